"""Which tensors of an operator may be sharded, and what its result is then."""

from __future__ import annotations

from kernlib.descriptors.text import from_text
from kernlib.sharding import Choice


def _rows(x, batch_last: bool) -> range:
    return range(1, x.dim()) if batch_last else range(x.dim() - 1)


def _whole(*, x, descriptor: str, **_) -> list[Choice]:
    return _product(x=x, batch_last=from_text(descriptor).batch_last)


def _product(*, x, batch_last: bool, **_) -> list[Choice]:
    return [Choice({"x": dim}, (dim,)) for dim in _rows(x, batch_last)]


def _weight_gradient(*, x, batch_last: bool, **_) -> list[Choice]:
    return [Choice({"grad": dim, "x": dim}, (None,)) for dim in _rows(x, batch_last)]


RULES = {
    "kronecker_sparse": _whole,
    "kronecker_sparse_product": _product,
    "kronecker_sparse_weight_gradient": _weight_gradient,
}
