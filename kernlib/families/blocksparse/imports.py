"""Other libraries' block-sparse matrices for layouts: torch's BSR tensors, and FlexAttention's
masks of blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.families.blocksparse.conditions import BEYOND_CAUSAL, CONDITION
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


class Bsr(NamedTuple):
    """Rows and columns of the blocks of a BSR tensor in a layout's order, the grid, the block, and
    the values, one block after the other in that order."""

    rows: torch.Tensor
    cols: torch.Tensor
    grid: tuple[int, int]
    block: tuple[int, int]
    values: torch.Tensor


def read_bsr(bsr: object) -> Bsr:
    """The blocks of a BSR tensor; gradients of its values are recorded. Raises TypeError for
    another tensor, ValueError for a batch and sizes of blocks that no kernel takes."""
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
    """The blocks that a FlexAttention mask computes, as bools (RB, CB) or (heads, RB, CB), and the
    block. Raises TypeError for what is no BlockMask, ValueError for batches that differ and for
    sizes of blocks that no kernel takes."""
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
    heads = mask[0]
    return (heads[0] if heads.shape[0] == 1 else heads), block


def condition_of(block_mask) -> str:
    """The arguments that attention over the blocks of a FlexAttention mask needs, "" where all
    blocks are full. Partial blocks are those that it lists apart from its full ones, whatever
    ``mask_mod`` it has: a slice may have none. Waits for the device."""
    has_rule = _rule(block_mask) is not None
    if not has_rule and block_mask.full_kv_num_blocks is None:
        return ""  # one list, of whole blocks
    if not bool((block_mask.kv_num_blocks > 0).any()):
        return ""
    return BEYOND_CAUSAL if _is_beyond_causal(block_mask) else CONDITION


def _rule(block_mask):
    """The mask's ``mask_mod``, None for one that leaves nothing out."""
    rule = getattr(block_mask, "mask_mod", None)
    return None if getattr(rule, "__name__", "noop_mask") == "noop_mask" else rule


def _is_beyond_causal(block_mask) -> bool:
    """Whether a mask leaves out columns up to the diagonal in blocks that it lists, as one for
    padding does. False where that would need a ``mask_mod`` and there is none, or it takes no
    tensors of indices."""
    if block_mask.full_kv_num_blocks is None:
        return False  # whole blocks may be listed too
    (rows, cols), (queries, keys) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, ceil_div(keys, cols))
    device, partial = partial.device, partial[0]
    first_row, first_col = (
        torch.arange(count, device=device, dtype=torch.int64) * size
        for count, size in zip(partial.shape[-2:], (rows, cols), strict=True)
    )
    is_before = first_col + (cols - 1) <= first_row[:, None]
    if bool((partial & is_before).any()):
        return True
    rule = _rule(block_mask)
    if rule is None:
        return False
    down, across = (torch.arange(n, device=device, dtype=torch.int64) for n in (rows, cols))
    for head, marks in enumerate(partial & (first_col <= first_row[:, None] + (rows - 1))):
        line, column = marks.nonzero(as_tuple=True)
        q = (first_row[line, None] + down)[:, :, None]
        k = (first_col[column, None] + across)[:, None]
        exists = (q < queries) & (k < keys)
        indices = (torch.tensor(n, device=device, dtype=torch.int64) for n in (0, head))
        try:
            seen = rule(*indices, q.clamp(max=queries - 1), k.clamp(max=keys - 1))
            seen = torch.broadcast_to(seen, exists.shape)
            if bool((exists & (k <= q) & ~seen).any()):
                # Each of the mask's own blocks has visible entries. A ``mask_mod`` without them is
                # another mask's.
                return bool((exists & seen).flatten(1).any(1).all())
        except Exception:  # of a function that is made for single indices, whatever that raises
            return False
    return False


def _listed(counts: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    """Bools (..., rows, width) of lists of columns (..., rows, entries), of which as many count as
    ``counts`` (..., rows) says. Raises ValueError for columns on the CPU that are out of range;
    those on a GPU are left out."""
    entries = torch.arange(indices.shape[-1], dtype=torch.int32, device=indices.device)
    listed = entries < counts.unsqueeze(-1)
    valid = listed & (indices >= 0) & (indices < width)
    if indices.device.type == "cpu" and not torch.equal(valid, listed):
        raise ValueError(
            f"block_mask must list columns below {width}, as its seq_lengths say, got "
            f"{int(indices[listed & ~valid][0])}"
        )
    marks = torch.zeros(*indices.shape[:-1], width + 1, dtype=torch.bool, device=indices.device)
    at = torch.where(valid, indices.long(), width)  # a column that is cut off
    return marks.scatter_(-1, at, True)[..., :width]
