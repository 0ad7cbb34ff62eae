"""Operands of products with Kronecker products, and these products by their formula in float64."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, reduce

import torch

GATES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SIDES = ("right", "left")
SHAPES = ((2, 3), (4, 5))  # of two factors, 8 features to 15
# Rectangular and distinct ones, squares, sizes of 1, and up to 65 factors.
MANY = {
    "two": SHAPES,
    "one": ((5, 7),),
    "one of 1": ((1, 1),),
    "a row": ((1, 6), (2, 2)),
    "a column": ((6, 1), (2, 2)),
    "to one feature": ((3, 1), (5, 1)),
    "of one feature": ((1, 3), (1, 5)),
    "three": ((3, 2), (5, 4), (2, 7)),
    "squares": ((3, 3), (4, 4), (2, 2)),
    "large beside small": ((31, 2), (1, 3), (2, 29)),
    "ten": ((2, 2),) * 7 + ((1, 2), (3, 1), (2, 1)),
    "64": ((1, 1),) * 62 + ((2, 3), (3, 2)),
    "65": ((2, 3), *((1, 1),) * 40, (3, 1), *((1, 1),) * 22, (1, 2)),
}
SIZES = (1, 2, 3, 5, 7, 12, 31, 55, 127, 129)


def dense(factors) -> torch.Tensor:
    """``F1 ⊗ ... ⊗ FN`` of matrices or batches of them."""

    def kron(a, b):
        made = torch.einsum("...ij,...kl->...ikjl", a, b)
        return made.flatten(-4, -3).flatten(-2, -1)

    return reduce(kron, (f.double() for f in factors))


def product(x: torch.Tensor, factors, side: str = "right") -> torch.Tensor:
    """The formula in float64."""
    return x.double() @ dense(factors) if side == "right" else dense(factors) @ x.double()


def by_modes(x: torch.Tensor, factors) -> torch.Tensor:
    """``x (F1 ⊗ ... ⊗ FN)`` in float64, one factor after the other."""
    made = x.double().unflatten(-1, [len(f) for f in factors])
    for axis, f in enumerate(factors, x.dim() - 1):
        made = torch.tensordot(made, f.double(), dims=([axis], [0])).movedim(-1, axis)
    return made.flatten(x.dim() - 1)


def randn(*shape: int, dtype=torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def features(shapes, side: str = "right") -> int:
    """Of x."""
    return reduce(lambda n, shape: n * shape[side == "left"], shapes, 1)


def operands(shapes, rows: int, side: str = "right", dtype=torch.float64, grad: bool = False):
    """x and the factors, which leave the size of a number as it is."""
    wide = features(shapes, side)
    x = randn(*((rows, wide) if side == "right" else (wide, rows)), dtype=dtype, grad=grad)
    factors = []
    for shape in shapes:  # 60 normal numbers would multiply to 1e-17
        made = (
            randn(*shape) * shape[side == "left"] ** -0.5 if max(shape) > 1 else 1 + randn(1, 1) / 9
        )
        factors.append(made.to(dtype).requires_grad_(grad))
    return x, factors


def assert_near(found, wanted, gate=None, axis: int | None = None, terms=None) -> None:
    """Within the gate of its type: as a whole, or each of the vectors along a dimension, beside
    ``wanted`` or sums of absolute terms."""
    gate = GATES[found.dtype] if gate is None else gate
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    norm = partial(torch.linalg.vector_norm, dim=axis)
    error, size = norm(found.double() - wanted), norm(wanted if terms is None else terms)
    assert (error <= gate * size.clamp(min=1e-300)).all(), (error / size).max()


def layouts(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values in other memory."""
    last_first = tuple(reversed(range(t.dim())))
    yield "turned", t.mT.contiguous().mT
    yield "backwards", t.permute(last_first).contiguous().permute(last_first)
    wide = torch.zeros([2 * n + 1 for n in t.shape], dtype=t.dtype)
    yield "strided", wide[tuple(slice(1, None, 2) for _ in t.shape)].copy_(t)
    yield "unaligned", torch.zeros(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape).copy_(t)
    yield "negated", torch._neg_view(-t)
    padded = torch.zeros((*t.shape[:-1], t.shape[-1] + 3), dtype=t.dtype)
    yield "rows apart", padded[..., 1:-2].copy_(t)
