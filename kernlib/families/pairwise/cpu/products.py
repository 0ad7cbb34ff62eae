"""Matrix products whose sums may be long."""

from __future__ import annotations

import torch

# Terms that a product may add one after the other, and those of a part of a longer sum.
LONGEST_SUM, PART_OF_SUM = 1024, 256


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` of (..., M, N) and (..., N, C). Torch's products on the CPU may add up all
    terms of a sum one after the other: of 200,000 in float32 they were 2e-4 off. There long sums go
    by parts, in memory of no more numbers than the operands have."""
    (rows, terms), columns = left.shape[-2:], right.shape[-1]
    if left.device.type != "cpu" or left.dtype != torch.float32 or terms <= LONGEST_SUM:
        return left @ right
    length = max(PART_OF_SUM, min(rows, columns))  # so that partial sums are fewer than terms
    parts = terms // length
    covered = parts * length
    lines = left[..., :covered].unflatten(-1, (parts, length)).movedim(-2, 0)
    points = right[..., :covered, :].unflatten(-2, (parts, length)).movedim(-3, 0)
    total = (lines @ points).sum(0)
    return total if covered == terms else total + left[..., covered:] @ right[..., covered:, :]
