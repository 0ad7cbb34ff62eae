"""Which tensors of an operator may be sharded, and what its result is then."""

from __future__ import annotations

from kernlib.descriptors.text import from_text
from kernlib.sharding import Choice


def _product(*, x, factors, descriptor: str, tensors, **_) -> list[Choice]:
    """Batches of factors and of summands would have to be sharded too."""
    if any(factor.dim() > 2 for factor in factors) or any(t.dim() > 1 for t in tensors):
        return []
    features = x.dim() + from_text(descriptor).axis
    return [Choice({"x": dim}, (dim,)) for dim in range(x.dim()) if dim != features]


RULES = {"kronecker_product": _product}
