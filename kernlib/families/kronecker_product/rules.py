"""What torch asks of the operators besides their results. FlopCounterMode gets the number of
operations, two for each product that is added up. DTensors get the tensors that may be sharded, and
how the result is sharded then."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.sharding import Choice

# Operations.


def _count_product(result: torch.Tensor, /, *, factors, descriptor: str, **_) -> int:
    """Factor by factor, in the order of the fewest operations."""
    product = from_text(descriptor)
    sizes = [tuple(factor.shape[-2:]) for factor in factors]
    turned = [flag != (product.side == "left") for flag in product.transposed]
    sizes = [size[::-1] if flag else size for size, flag in zip(sizes, turned, strict=True)]
    elements, total = result.numel(), 0
    for rows, columns in sizes:
        elements = elements // columns * rows
    for rows, columns in sorted(sizes, key=lambda size: 1 / size[0] - 1 / size[1]):
        total += 2 * elements * columns
        elements = elements // rows * columns
    return total


def _count_gradients(result: list, /, *, grad, needs, **operands) -> int:
    """As many for x as for the product; twice as many for factors, which take products and their
    sums."""
    return (needs[0] + 2 * any(needs[1:])) * _count_product(grad, **operands)


FORMULAS = {
    "kronecker_product": _count_product,
    "kronecker_product_gradients": _count_gradients,
    "kronecker_product_of": _count_product,
}


# Shardings.


def _shard_product(*, x, factors, descriptor: str, tensors, **_) -> list[Choice]:
    """Batches of factors and of summands would have to be sharded too."""
    if any(factor.dim() > 2 for factor in factors) or any(t.dim() > 1 for t in tensors):
        return []
    features = x.dim() + from_text(descriptor).axis
    return [Choice({"x": dim}, (dim,)) for dim in range(x.dim()) if dim != features]


SHARDINGS = {"kronecker_product": _shard_product}
