"""What torch asks of the operators besides their results. FlopCounterMode gets the number of
operations: two for each feature of each pair of points, as for a product of matrices of these
sizes, whatever the kernel is. DTensors get the tensors that may be sharded, and how the result is
sharded then."""

from __future__ import annotations

import torch

from kernlib.sharding import Choice

# Operations.


def _count_matrix(result: torch.Tensor, /, *, a, out=None, **_) -> int:
    return 2 * (result if out is None else out).numel() * a.shape[-1]


def _pairs(a, b, *others) -> int:
    batch = max(t.shape[0] if t is not None and t.dim() == 3 else 1 for t in (a, b, *others))
    return batch * a.shape[-2] * (a if b is None else b).shape[-2]


def _columns(v) -> int:
    return 0 if v is None else v.shape[-1] if v.dim() > 1 else 1


def _count_reduced(result, /, *, a, b, v=None, **_) -> int:
    return 2 * _pairs(a, b, v) * (a.shape[-1] + _columns(v))


def _count_reduced_gradient(result: list, /, *, a, b, v, wanted: str, **_) -> int:
    """With the matrix anew."""
    names = wanted.split()
    features = a.shape[-1] * (1 + ("a" in names) + ("b" in names))
    return 2 * _pairs(a, b, v) * (features + _columns(v) * (1 + ("v" in names)))


def _count_gradient(result: torch.Tensor, /, *, x, weights, **_) -> int:
    return 2 * weights.numel() * x.shape[-1]


FORMULAS = {
    "pairwise": _count_matrix,
    "pairwise_categories": _count_matrix,
    "pairwise_choose": _count_reduced,
    "pairwise_gradient": _count_gradient,
    "pairwise_norm_gradient": _count_gradient,
    "pairwise_norms": _count_matrix,
    "pairwise_out": _count_matrix,
    "pairwise_reduce": _count_reduced,
    "pairwise_reduce_gradient": _count_reduced_gradient,
    "pairwise_sums": _count_matrix,
}


# Shardings.


def _shard_matrix(*, a, b, names: str = "", tensors=(), **_) -> list[Choice]:
    """Points, unless something is said of a pair by its place or has a batch."""
    if b is None or "regularization" in names.split() or any(t.dim() for t in tensors):
        return []
    rank = max(a.dim(), b.dim())
    return [
        Choice({"a": a.dim() - 2}, (rank - 2,)),
        Choice({"b": b.dim() - 2}, (rank - 1,)),
    ]


def _shard_reduced(*, a, b, v=None, names: str, tensors, **_) -> list[Choice]:
    if "regularization" in names.split() or any(t.dim() for t in tensors):
        return []
    batched = max(t.dim() for t in (a, b, v) if t is not None) == 3
    return [Choice({"a": a.dim() - 2}, (int(batched),) * 2)]


def _shard_gradient(*, x, z, weights, norms=None, p, scale, **_) -> list[Choice]:
    """Of x (L, M, K), z (L, N, K) and a weight for each pair, (L, M, N)."""
    if any(t is not None and t.dim() for t in (p, scale)):
        return []
    pairs = ("weights",) if norms is None else ("weights", "norms")
    return [
        Choice({"x": 1, **dict.fromkeys(pairs, 1)}, (1,)),
        Choice({"z": 1, **dict.fromkeys(pairs, 2)}, (None,)),
    ]


def _shard_sums(*, a, b, p, scale, **_) -> list[Choice]:
    return _shard_matrix(a=a, b=b, tensors=[t for t in (p, scale) if t is not None])


SHARDINGS = {
    "pairwise": _shard_matrix,
    "pairwise_choose": _shard_reduced,
    "pairwise_gradient": _shard_gradient,
    "pairwise_norm_gradient": _shard_gradient,
    "pairwise_norms": _shard_sums,
    "pairwise_reduce": _shard_reduced,
    "pairwise_sums": _shard_sums,
}
