"""Which tensors of an operator may be sharded, and what its result is then."""

from __future__ import annotations

from kernlib.sharding import Choice


def _product(*, x, **_) -> list[Choice]:
    return [Choice({"x": dim}, (dim,)) for dim in range(x.dim() - 1)]


RULES = {"sparse_matmul": _product, "sparse_matmul_product": _product}
