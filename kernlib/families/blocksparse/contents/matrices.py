"""Stored blocks as matrices and back, and where lines begin: torch's operators on any device,
differentiable by values and without waiting."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.contents.bits import popcount
from kernlib.families.blocksparse.lowering.problem import Blocks

Tensors = tuple[torch.Tensor, ...]


def places(blocks: Blocks, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each slot's block lies among all (head, row, column), and whether it holds one."""
    _, _, _, rows, cols, _ = tensors
    live = rows >= 0
    return rows.long() * blocks.grid_cols + cols, live


def check_values(values: torch.Tensor, blocks: Blocks) -> None:
    """Raises ValueError for values of another shape than the layout's."""
    expected = blocks.capacity, blocks.rows, blocks.cols
    if tuple(values.shape[-3:]) != expected:
        shape = ", ".join(map(str, expected))
        raise ValueError(
            f"values must have shape (..., {shape}), a block for each slot of the layout, got "
            f"{tuple(values.shape)}"
        )


def with_heads(dense: torch.Tensor, blocks: Blocks, heads: int | None) -> torch.Tensor:
    """Matrices (..., heads, R, C), of which one may stand for all heads. Raises ValueError for
    other shapes than the layout's."""
    size = blocks.grid_rows * blocks.rows, blocks.grid_cols * blocks.cols
    expected = size if heads is None else (heads, *size)
    shape = tuple(dense.shape[-len(expected) :])
    if shape != expected and (heads is None or shape != (1, *size)):
        raise ValueError(
            f"dense must have shape (..., {', '.join(map(str, expected))}) for this layout, got "
            f"{tuple(dense.shape)}"
        )
    if heads is None:
        return dense.unsqueeze(-3)
    return dense.expand(*dense.shape[:-3], *expected)


def to_dense(values: torch.Tensor, blocks: Blocks, tensors: Tensors) -> torch.Tensor:
    """Values (..., capacity, rows, cols) as matrices (..., heads, R, C)."""
    if _is_float8(values):
        return to_dense(values.view(torch.uint8), blocks, tensors).view(values.dtype)
    at, live = places(blocks, tensors)
    total = blocks.heads * blocks.grid_rows * blocks.grid_cols
    at = torch.where(live, at, total)  # a place behind all that is cut off
    shape = (*values.shape[:-3], total + 1, blocks.rows, blocks.cols)
    spread = values.new_zeros(shape).index_copy(values.dim() - 3, at, values)
    grid = blocks.heads, blocks.grid_rows, blocks.grid_cols
    # (..., heads, RB, CB, rows, cols), by reshape, as is_grads_batched knows no unflatten.
    apart = spread[..., :total, :, :].reshape(*values.shape[:-3], *grid, blocks.rows, blocks.cols)
    size = blocks.grid_rows * blocks.rows, blocks.grid_cols * blocks.cols
    return apart.transpose(-3, -2).reshape(*values.shape[:-3], blocks.heads, *size)


def to_blocks(dense: torch.Tensor, blocks: Blocks, tensors: Tensors) -> torch.Tensor:
    """Matrices (..., heads, R, C) as values (..., capacity, rows, cols), 0 in slots without."""
    if _is_float8(dense):
        return to_blocks(dense.view(torch.uint8), blocks, tensors).view(dense.dtype)
    lead = dense.shape[:-3]
    size = blocks.rows, blocks.cols
    total = blocks.heads * blocks.grid_rows * blocks.grid_cols
    if total == 0:
        nothing = dense.sum(dtype=dense.dtype)  # of no numbers, for a gradient to be recorded
        return nothing.expand(*lead, blocks.capacity, *size).contiguous()
    at, live = places(blocks, tensors)
    grid = blocks.grid_rows, blocks.rows, blocks.grid_cols, blocks.cols
    apart = dense.reshape(*lead, blocks.heads, *grid).transpose(-3, -2)
    gathered = apart.reshape(*lead, total, *size).index_select(-3, torch.where(live, at, 0))
    return torch.where(live[:, None, None], gathered, 0)


def _is_float8(t: torch.Tensor) -> bool:
    """Whether torch, which copies no such numbers by index, has to see bytes instead."""
    return t.is_floating_point() and t.element_size() == 1


def row_starts(blocks: Blocks, tensors: Tensors) -> torch.Tensor:
    """The first slot of each row of blocks, and behind them the number of live ones."""
    row_bits, row_ranks, *_, counts = tensors
    if blocks.row_words == 0:
        return row_bits.new_zeros(row_bits.shape[0] + 1)
    return torch.cat((row_ranks[:, 0], counts[:1]))


def col_starts(blocks: Blocks, tensors: Tensors) -> torch.Tensor:
    """The first entry of each column of blocks in :func:`col_order`, and the number of all."""
    counts = popcount(tensors[2]).sum(-1, dtype=torch.int32)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def col_order(blocks: Blocks, tensors: Tensors) -> torch.Tensor:
    """Slots by head, column, row; those without a block last."""
    _, live = places(blocks, tensors)
    rows, cols = tensors[3].long(), tensors[4].long()
    height = max(blocks.grid_rows, 1)
    lines = rows // height * blocks.grid_cols + cols
    by_column = lines * height + rows % height
    last = blocks.heads * height * blocks.grid_cols
    return torch.where(live, by_column, last).argsort(stable=True).to(torch.int32)
