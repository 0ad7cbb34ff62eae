"""Factors in batches, the matrix that they make, and what is asked of results."""

from __future__ import annotations

from functools import reduce

import torch

from tests.linalg.cases import positive

WIDE = torch.float64


def kron(factors) -> torch.Tensor:
    """The matrix itself, of batches that broadcast."""

    def of_two(a, b):
        made = a[..., :, None, :, None] * b[..., None, :, None, :]
        return made.flatten(-4, -3).flatten(-2)

    return reduce(of_two, factors)


def spd(case, dtype=WIDE) -> list[torch.Tensor]:
    """Positive definite factors of a case: the size of each, and the batch of each."""
    return [positive(*batch, n, n, dtype=dtype) for n, batch in zip(*case, strict=True)]


def square(case) -> list[torch.Tensor]:
    """Not symmetric, nor near singular."""
    return [f + torch.randn_like(f) / 4 for f in spd(case)]


def with_condition(n: int, exponent: float) -> torch.Tensor:
    """Symmetric, with eigenvalues from 1 to 10^-exponent."""
    turn = torch.linalg.qr(torch.randn(n, n, dtype=WIDE)).Q
    made = (turn * torch.logspace(0, -exponent, n, dtype=WIDE)) @ turn.mT
    return (made + made.mT) / 2


def shifted(matrix: torch.Tensor, noise) -> torch.Tensor:
    noise = torch.as_tensor(noise, dtype=WIDE)
    return matrix + noise[..., None, None] * torch.eye(matrix.shape[-1], dtype=WIDE)


def dense_solution(matrix: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = b.expand(*matrix.shape[:-2], *b.shape) if b.dim() == 1 else b
    return torch.linalg.solve(matrix, wide)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert (found - wanted).norm() <= tolerance * wanted.norm()


def with_gradient(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in tensors]


def check_derivatives(function, *inputs: torch.Tensor) -> None:
    """The first and the second."""
    inputs = with_gradient(*inputs)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
