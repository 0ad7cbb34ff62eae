"""What tests of Torch-Blocksparse's names share: layouts, blocks, and how near values are."""

from __future__ import annotations

import torch

HALF, DOUBLE = torch.float16, torch.float64
TOLERANCES = {torch.float32: (1e-4, 1e-2), HALF: (1e-2, 1e-3), DOUBLE: (1e-9, 1e-9)}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    rtol, atol = TOLERANCES[found.dtype]
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=rtol, atol=atol)


def random_layout(heads: int, rows: int, cols: int, density: float = 0.5) -> torch.Tensor:
    return (torch.rand(heads, rows, cols) < density).long()


def blocks_of(dense: torch.Tensor, layout: torch.Tensor, block: int) -> torch.Tensor:
    """[Z, nnz, block, block] of [Z, H, rows, cols]."""
    h, r, c = layout.nonzero().unbind(1)
    apart = dense.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)
    return apart[:, h, r, c]


def masked(dense: torch.Tensor, layout: torch.Tensor, block: int, fill: float = 0.0):
    kept = layout.repeat_interleave(block, 1).repeat_interleave(block, 2) != 0
    return dense.masked_fill(~kept, fill)
