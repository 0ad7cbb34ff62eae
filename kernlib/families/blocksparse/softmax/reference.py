"""Softmax over stored blocks in PyTorch, differentiable as often as is asked for, and its gradient.

Sums and maxima of rows lay out a number for each row of each block by line and column, where each
block has a place of its own. So sums are the same each time on every device, and no device is
waited for."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.reference import taken
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import host_value

LOWEST = -torch.inf


def softmax(
    descriptor: BlockSparseSoftmax, layout: Layout, x: torch.Tensor, scale, parameters: dict
) -> torch.Tensor:
    """The result of ``descriptor`` for values (..., capacity, rows, columns), in their dtype; half
    types are computed in float32."""
    wide = accumulator(x.dtype)
    live = _live(layout)[:, None, None]
    if _is_empty(layout):
        return torch.where(live, x, 0.0)
    masks = {name: _blocks_of(layout, name, value) for name, value in parameters.items()}
    mask = live & _kept(descriptor, layout, masks)
    # 0 where masks leave out: the scale's gradient would read x there.
    logits = scaled(torch.where(mask, x, 0.0).to(wide), scale)
    for blocks in _added(descriptor, masks):
        logits = logits + blocks.to(wide)
    logits = torch.where(mask, logits, LOWEST)
    most = _over_rows(layout, logits.detach().amax(-1), LOWEST)
    most = torch.where(most == LOWEST, 0.0, most)
    powers = torch.exp(logits - most.unsqueeze(-1))
    sums = row_sums(layout, powers.sum(-1)).unsqueeze(-1)
    y = powers / torch.where(sums == 0.0, 1.0, sums)
    return torch.where(live, y, 0.0).to(x.dtype).contiguous()


def scaled(x: torch.Tensor, scale) -> torch.Tensor:
    """``x * scale``, of a tensor wherever it lies and of whichever type a number is."""
    if isinstance(scale, torch.Tensor):
        return x * scale.to(x.device, x.dtype)
    return x * host_value("scale", scale, 0)


def gradient(layout: Layout, grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y * (grad - sum(y * grad))``, that of a softmax by its logits; of half types in float32."""
    live = _live(layout)[:, None, None]
    wide = accumulator(y.dtype)
    y, grad = torch.where(live, y, 0.0).to(wide), torch.where(live, grad, 0.0).to(wide)
    if _is_empty(layout):
        return y
    return y * (grad - row_sums(layout, (y * grad).sum(-1)).unsqueeze(-1))


def row_sums(layout: Layout, parts: torch.Tensor) -> torch.Tensor:
    """The sums over whole rows of a number for each row of each block (..., capacity, rows), in the
    same places."""
    return _over_rows(layout, parts, 0.0)


def _over_rows(layout: Layout, parts: torch.Tensor, empty: float) -> torch.Tensor:
    """The sum of each row, or the largest, where ``empty`` is -inf."""
    rows, cols = _lines(layout)
    lines, across = (layout.heads or 1) * layout.grid[0], layout.grid[1]
    at = torch.where(_live(layout), rows * across + cols, lines * across)  # or a place behind all
    shape = (*parts.shape[:-2], lines * across + 1, parts.shape[-1])
    spread = parts.new_full(shape, empty).index_copy(parts.dim() - 2, at, parts)
    dense = spread.narrow(spread.dim() - 2, 0, lines * across)
    apart = dense.reshape(*parts.shape[:-2], lines, across, parts.shape[-1])
    reduced = apart.amax(-2) if empty == LOWEST else apart.sum(-2)
    return taken(reduced, reduced.dim() - 2, rows)


def _is_added(descriptor: BlockSparseSoftmax, name: str, blocks: torch.Tensor) -> bool:
    """Whether a tensor is added, else it says what takes part."""
    return blocks.dtype != torch.bool and (name == "rpe" or getattr(descriptor, name) == "add")


def _added(descriptor: BlockSparseSoftmax, masks: dict) -> list[torch.Tensor]:
    return [blocks for name, blocks in masks.items() if _is_added(descriptor, name, blocks)]


def _kept(descriptor: BlockSparseSoftmax, layout: Layout, masks: dict) -> torch.Tensor | bool:
    """The elements that masks and the diagonal leave."""
    mask = _is_at_most_diagonal(layout) if descriptor.causal else True
    for name, blocks in masks.items():
        if not _is_added(descriptor, name, blocks):
            mask = mask & (blocks if blocks.dtype == torch.bool else blocks != 0.0)
    return mask


def _blocks_of(layout: Layout, name: str, given: torch.Tensor) -> torch.Tensor:
    """A dense tensor at the stored blocks: what broadcasts to (..., capacity, rows, columns)."""
    (rows, cols), (grid_rows, grid_cols) = layout.block, layout.grid
    line, across = _lines(layout)
    if name == "key_padding_mask":
        given = given.reshape(given.shape or (1,))
        # reshape, as is_grads_batched knows no unflatten.
        expanded = given.expand(*given.shape[:-1], layout.shape[1])
        apart = expanded.reshape(*given.shape[:-1], grid_cols, cols)
        picked = taken(apart, given.dim() - 1, across)
        return picked.unsqueeze(-2)
    least = 2 if layout.heads is None or name == "attn_mask" else 3
    given = given.reshape(*(1,) * (least - given.dim()), *given.shape)
    expanded = given.expand(*given.shape[:-2], *layout.shape)
    expanded = expanded.reshape(*given.shape[:-2], grid_rows, rows, grid_cols, cols)
    down = line % grid_rows
    if least == 2:
        picked = expanded[..., down, :, across, :]
    else:
        head = torch.div(line, grid_rows, rounding_mode="floor")
        head = head if given.shape[-3] > 1 else torch.zeros_like(head)
        picked = expanded[..., head, down, :, across, :]
    return picked.movedim(0, -3)  # separated indices make theirs the first dimension


def _is_at_most_diagonal(layout: Layout) -> torch.Tensor:
    """Whether the column of each stored element (capacity, rows, columns) is not behind its row."""
    line, across = _lines(layout)
    rows, cols = layout.block
    down, behind = (
        torch.arange(size, dtype=line.dtype, device=line.device) for size in (rows, cols)
    )
    row = (line % layout.grid[0] * rows)[:, None] + down
    col = (across * cols)[:, None] + behind
    return col[:, None, :] <= row[:, :, None]


def _live(layout: Layout) -> torch.Tensor:
    return layout.tensors[3] >= 0


def _lines(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Line and column of each slot's block, 0 of slots that hold none."""
    rows, cols = (t.long().clamp(min=0) for t in layout.tensors[3:5])
    return rows, cols


def _is_empty(layout: Layout) -> bool:
    """Whether there is no place for a block."""
    return 0 in layout.grid
