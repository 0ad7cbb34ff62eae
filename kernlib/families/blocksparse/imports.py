"""What other libraries' block-sparse matrices store, as layouts take it: torch's BSR tensors, and
FlexAttention's masks of blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.families.blocksparse.contents.sizes import checked_block
from kernlib.families.blocksparse.contents.writing import refuse_capture
from kernlib.lowering.arithmetic import ceil_div
from kernlib.runtime.tensors import refuse_transforms

FIELDS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "BLOCK_SIZE",
    "seq_lengths",
)
ADVICE = "no layout can be made of; make it outside"
CONDITION = "what its mask_mod says as mask= or causal="


class Bsr(NamedTuple):
    """Rows and columns of the blocks of a BSR tensor in a layout's order, the grid, the block, and
    the values, one block after the other in that order."""

    rows: torch.Tensor
    cols: torch.Tensor
    grid: tuple[int, int]
    block: tuple[int, int]
    values: torch.Tensor


def read_bsr(bsr: object) -> Bsr:
    """What a BSR tensor stores; gradients of its values are recorded. Raises TypeError for another
    tensor, ValueError for a batch and sizes of blocks that no kernel takes."""
    if not isinstance(bsr, torch.Tensor) or bsr.layout != torch.sparse_bsr:
        kind = bsr.layout if isinstance(bsr, torch.Tensor) else type(bsr).__name__
        raise TypeError(
            f"bsr must be a tensor of layout torch.sparse_bsr, got {kind}; use "
            "dense.to_sparse_bsr((32, 32))"
        )
    refuse_transforms(ADVICE, bsr=bsr)
    values = bsr.values()
    if bsr.dim() != 2 or values.dim() != 3:
        raise ValueError(
            f"bsr must be one matrix (R, C) with blocks of numbers, got shape {tuple(bsr.shape)} "
            f"and values {tuple(values.shape)}; make a layout of each matrix of a batch"
        )
    block = checked_block(tuple(values.shape[1:]))
    grid = bsr.shape[0] // block[0], bsr.shape[1] // block[1]
    cols = bsr.col_indices().long()
    refuse_capture(cols.device, "reading bsr", "make the layout before the capture")
    counts = bsr.crow_indices().long().diff()
    rows = torch.repeat_interleave(counts, output_size=cols.shape[0])
    order = (rows * max(grid[1], 1) + cols).argsort(stable=True)
    return Bsr(rows[order], cols[order], grid, block, values.index_select(0, order))


def read_block_mask(block_mask: object) -> tuple[torch.Tensor, tuple[int, int]]:
    """Which blocks a FlexAttention mask computes, bools (RB, CB) or (heads, RB, CB), and the block.
    Raises TypeError for what is no BlockMask, ValueError for batches that differ and for sizes of
    blocks that no kernel takes."""
    if not all(hasattr(block_mask, name) for name in FIELDS):
        raise TypeError(
            "block_mask must be a torch.nn.attention.flex_attention.BlockMask, got "
            f"{type(block_mask).__name__}"
        )
    block = checked_block(tuple(block_mask.BLOCK_SIZE))
    width = ceil_div(block_mask.seq_lengths[1], block[1])  # lists may be of fewer columns
    mask = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, width)
    if block_mask.full_kv_num_blocks is not None:
        full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        mask = mask | _listed(*full, width)
    if mask.dim() != 4:
        raise ValueError(
            "block_mask must have the dimensions (batch, heads, rows), got "
            f"{tuple(mask.shape[:-1])}"
        )
    if mask.shape[0] > 1:
        refuse_capture(mask.device, "comparing a batch", "make the layout before the capture")
        if not torch.equal(mask, mask[:1].expand_as(mask)):
            raise ValueError(
                f"block_mask must be the same for all of its batch of {mask.shape[0]}, as a layout "
                "has no batch; take block_mask[i:i + 1] for each, or make of block_mask.to_dense() "
                "the mask (B * H, RB, CB) of a Layout, which attention takes"
            )
    if mask.shape[0] == 0:
        raise ValueError("block_mask must have a batch of at least 1, got 0")
    found = mask[0]
    return (found[0] if found.shape[0] == 1 else found), block


def has_partial_blocks(block_mask) -> bool:
    """Whether the ``mask_mod`` of a FlexAttention mask leaves something out of a block that it
    lists. Waits for the device."""
    named = getattr(getattr(block_mask, "mask_mod", None), "__name__", "noop_mask")
    return named != "noop_mask" and bool((block_mask.kv_num_blocks > 0).any())


def _listed(counts: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    """Bools (..., rows, width) of lists of columns (..., rows, entries), of which as many count as
    ``counts`` (..., rows) says. Raises ValueError for columns on the CPU that are out of range;
    those on a GPU are left out."""
    entries = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    listed = entries < counts.unsqueeze(-1)
    known = listed & (indices >= 0) & (indices < width)
    if indices.device.type == "cpu" and not torch.equal(known, listed):
        raise ValueError(
            f"block_mask must list columns below {width}, as its seq_lengths say, got "
            f"{int(indices[listed & ~known][0])}"
        )
    marks = torch.zeros(*indices.shape[:-1], width + 1, dtype=torch.bool, device=indices.device)
    at = torch.where(known, indices.long(), width)  # a column that is cut off
    return marks.scatter_(-1, at, True)[..., :width]
