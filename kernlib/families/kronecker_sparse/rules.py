"""What torch asks of the operators besides their results. FlopCounterMode gets the number of
operations, two for each product that is added up. DTensors get the tensors that may be sharded, and
how the result is sharded then."""

from __future__ import annotations

import math
from itertools import accumulate

import torch

from kernlib.descriptors.text import from_text
from kernlib.sharding import Choice

# Operations.


def _count_product(result: torch.Tensor, /, *, x, weight, **_) -> int:
    a, _b, c, d = weight.shape
    return 2 * x.numel() // (a * c * d) * weight.numel()


def _count_weight_gradient(result: torch.Tensor, /, *, grad, pattern, **_) -> int:
    a, b, _c, d = pattern
    return 2 * grad.numel() // (a * b * d) * math.prod(pattern)


def _count_chain(result: list, /, *, x, weights, **_) -> int:
    a, _b, c, d = weights[0].shape
    return 2 * x.numel() // (a * c * d) * sum(weight.numel() for weight in weights)


def _count_chain_gradients(result: list, /, *, hidden, weights, needs, **_) -> int:
    """Operations for each weight that needs a gradient, and for each h that leads to one or is
    computed again."""
    a, _b, c, d = weights[0].shape
    leads_on = accumulate(needs, max)
    counts = zip(weights, leads_on, needs[1:], strict=False)
    total = sum(weight.numel() * (leads + need) for weight, leads, need in counts)
    if len(hidden) < len(weights) and needs[2]:
        total += weights[0].numel()
    return 2 * hidden[0].numel() // (a * c * d) * total


FORMULAS = {
    "kronecker_sparse": _count_product,
    "kronecker_sparse_chain": _count_chain,
    "kronecker_sparse_chain_gradients": _count_chain_gradients,
    "kronecker_sparse_chain_product": _count_chain,
    "kronecker_sparse_product": _count_product,
    "kronecker_sparse_weight_gradient": _count_weight_gradient,
}


# Shardings.


def _shard_rows(x, batch_last: bool) -> range:
    return range(1, x.dim()) if batch_last else range(x.dim() - 1)


def _shard_whole(*, x, descriptor: str, **_) -> list[Choice]:
    return _shard_product(x=x, batch_last=from_text(descriptor).batch_last)


def _shard_product(*, x, batch_last: bool, **_) -> list[Choice]:
    return [Choice({"x": dim}, (dim,)) for dim in _shard_rows(x, batch_last)]


def _shard_weight_gradient(*, x, batch_last: bool, **_) -> list[Choice]:
    return [Choice({"grad": dim, "x": dim}, (None,)) for dim in _shard_rows(x, batch_last)]


SHARDINGS = {
    "kronecker_sparse": _shard_whole,
    "kronecker_sparse_product": _shard_product,
    "kronecker_sparse_weight_gradient": _shard_weight_gradient,
}
