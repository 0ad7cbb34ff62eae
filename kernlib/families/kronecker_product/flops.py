"""Operations of each operator, as torch's FlopCounterMode counts them: two for a product that is
added up."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text


def _product(result: torch.Tensor, /, *, factors, descriptor: str, **_) -> int:
    """Factor by factor, in the order of the fewest operations."""
    made = from_text(descriptor)
    sizes = [tuple(factor.shape[-2:]) for factor in factors]
    turned = [flag != (made.side == "left") for flag in made.transposed]
    sizes = [size[::-1] if flag else size for size, flag in zip(sizes, turned, strict=True)]
    elements, total = result.numel(), 0
    for rows, columns in sizes:
        elements = elements // columns * rows
    for rows, columns in sorted(sizes, key=lambda size: 1 / size[0] - 1 / size[1]):
        total += 2 * elements * columns
        elements = elements // rows * columns
    return total


FORMULAS = {"kronecker_product": _product}
