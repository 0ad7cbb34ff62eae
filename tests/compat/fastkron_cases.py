"""What the tests of FastKron's functions share: operands, and the product by its matrix."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from kernlib.compat.fastkron.fastkrontorch import gekmm, gemkm

SIDES = ("mkm", "kmm")
P, Q = (3, 5, 2), (4, 1, 3)  # of three factors: 30 features to 12
ROWS = 7

each_side = pytest.mark.parametrize("side", SIDES)


def random(*shape, dtype=torch.float64, seed=0, requires_grad=False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return values.requires_grad_(requires_grad)


def factors(side, ps=P, qs=Q, batch=(), **options) -> list[torch.Tensor]:
    pairs = [(p, q) if side == "mkm" else (q, p) for p, q in zip(ps, qs, strict=True)]
    return [random(*batch, *pair, seed=place, **options) for place, pair in enumerate(pairs)]


def operand(side, features=30, rows=ROWS, batch=(), **options) -> torch.Tensor:
    ends = (rows, features) if side == "mkm" else (features, rows)
    return random(*batch, *ends, seed=99, **options)


def call(side, x, fs, *rest, **options) -> torch.Tensor:
    return gemkm(x, fs, *rest, **options) if side == "mkm" else gekmm(fs, x, *rest, **options)


def kron(a, b):
    """Of two matrices or of batches of them that broadcast."""
    rows, columns = a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1]
    made = torch.einsum("...pq,...rs->...prqs", a, b)
    return made.reshape(*made.shape[:-4], rows, columns)


def wanted(side, x, fs, alpha=1.0, beta=0.0, y=None) -> torch.Tensor:
    """By the matrix itself, in float64."""
    dense = reduce(kron, [f.double() for f in fs])
    made = x.double() @ dense if side == "mkm" else dense @ x.double()
    return alpha * made if y is None else alpha * made + beta * y.double()


def close(found, expected, tolerance=1e-13) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected).norm() / expected.norm().clamp(min=1e-300)
    assert error < tolerance, error


# Dimensions in front of x, and in front of every factor.
BATCHES = [
    ((), ()), ((2,), ()), ((2,), (2,)), ((2, 1), (3,)), ((2, 1), (2, 4)), ((3, 2, 1), (3, 1, 4)),
    ((2,), (3, 2)), ((), (3, 1)),
]  # fmt: skip
