"""Which tensors of an operator may be sharded, and what its result is then."""

from __future__ import annotations

from kernlib.sharding import Choice


def _matrix(*, a, b, names: str = "", tensors=(), **_) -> list[Choice]:
    """Points, unless something is said of a pair by its place or has a batch."""
    if b is None or "regularization" in names.split() or any(t.dim() for t in tensors):
        return []
    rank = max(a.dim(), b.dim())
    return [
        Choice({"a": a.dim() - 2}, (rank - 2,)),
        Choice({"b": b.dim() - 2}, (rank - 1,)),
    ]


def _reduced(*, a, b, v=None, names: str, tensors, **_) -> list[Choice]:
    if "regularization" in names.split() or any(t.dim() for t in tensors):
        return []
    batched = max(t.dim() for t in (a, b, v) if t is not None) == 3
    return [Choice({"a": a.dim() - 2}, (int(batched),) * 2)]


def _gradient(*, x, z, weights, norms=None, p, scale, **_) -> list[Choice]:
    """Of x (L, M, K), z (L, N, K) and a weight for each pair, (L, M, N)."""
    if any(t is not None and t.dim() for t in (p, scale)):
        return []
    pairs = ("weights",) if norms is None else ("weights", "norms")
    return [
        Choice({"x": 1, **dict.fromkeys(pairs, 1)}, (1,)),
        Choice({"z": 1, **dict.fromkeys(pairs, 2)}, (None,)),
    ]


def _sums(*, a, b, p, scale, **_) -> list[Choice]:
    return _matrix(a=a, b=b, tensors=[t for t in (p, scale) if t is not None])


RULES = {
    "pairwise": _matrix,
    "pairwise_choose": _reduced,
    "pairwise_gradient": _gradient,
    "pairwise_norm_gradient": _gradient,
    "pairwise_norms": _sums,
    "pairwise_reduce": _reduced,
    "pairwise_sums": _sums,
}
