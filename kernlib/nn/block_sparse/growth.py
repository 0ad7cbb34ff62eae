"""The blocks of a weight that stay, are dropped or are grown, and the slots to which values move.
All by torch's operators on any device, none of which waits for it.

A place is the number of a block among all of a grid, row by row; slots that hold no block have the
place behind the last.
"""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.contents import host
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.sparse.prune import largest
from kernlib.runtime.dtypes import accumulator

CRITERIA = ("magnitude", "random")


def places(layout: Layout) -> torch.Tensor:
    """The place of each slot's block, as int64 (capacity,): a new tensor."""
    rows, cols = (t.long() for t in layout.tensors[3:5])
    return torch.where(rows >= 0, rows * layout.grid[1] + cols, total(layout))


def total(layout: Layout) -> int:
    """Blocks of the whole grid."""
    return layout.grid[0] * layout.grid[1]


def squares(blocks: torch.Tensor) -> torch.Tensor:
    """The squared Frobenius norm of each block (..., rows, cols); of half types in float32."""
    return blocks.detach().to(accumulator(blocks.dtype)).square().sum((-2, -1))


def chosen(
    weight: torch.Tensor, block: tuple[int, int], density: float, criterion: str, per: str
) -> torch.Tensor:
    """The blocks of a matrix that stay, bools (RB, CB): exactly ``round(density * n)`` of the n
    blocks of the matrix, or of each row of blocks."""
    grid = [size // of for size, of in zip(weight.shape, block, strict=True)]
    if criterion == "random":
        scores = torch.rand(grid, dtype=torch.float32, device=weight.device)
    else:
        apart = weight.unflatten(1, (grid[1], block[1])).unflatten(0, (grid[0], block[0]))
        scores = squares(apart.transpose(1, 2))
    return largest(scores, density, per)


def without_smallest(layout: Layout, norms: torch.Tensor, most: torch.Tensor | int) -> torch.Tensor:
    """The mask of the ``most`` stored blocks of largest ``norms`` (capacity,); of equal ones the
    first stay, and NaN is the largest of all."""
    at = places(layout)
    live = at < total(layout)
    order = torch.where(live, norms, -1.0).argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, _count_up(order))
    return _with(layout, torch.where(live & (rank < most), at, total(layout)))


def with_largest(
    layout: Layout, candidates: Layout, norms: torch.Tensor, count: int
) -> torch.Tensor:
    """The mask of the stored blocks and of up to ``count`` more, those of the candidates that have
    the largest ``norms`` (its capacity,) and for which there is room; NaN counts as 0."""
    size, stored = total(layout), layout.mask().flatten()
    values = norms.nan_to_num(0.0).clamp(min=0.0)
    scores = values.new_full((size + 1,), -1.0).index_copy(0, places(candidates), values)[:size]
    scores = torch.where(stored, -1.0, scores)
    order = scores.argsort(descending=True, stable=True)[:count]
    room = layout.capacity - layout.tensors[5][0]
    fits = (scores.index_select(0, order) >= 0.0) & (_count_up(order) < room)
    grown = _with(layout, torch.where(fits, order, size)).flatten()
    return (stored | grown).view(layout.grid)


def sources(before: torch.Tensor, layout: Layout) -> torch.Tensor:
    """For each slot the slot that held its block when :func:`places` were ``before``, or -1: int64
    (capacity,)."""
    slots = before.new_full((total(layout) + 1,), -1).index_copy(0, before, _count_up(before))
    slots[total(layout) :].fill_(-1)  # an index would wait for the device
    return slots.index_select(0, places(layout))


def moved(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Blocks (capacity, rows, cols) in their new slots, 0 where there was none."""
    if not source.numel():
        return tensor.clone()
    blocks = tensor.index_select(0, source.clamp(min=0))
    return torch.where((source >= 0)[:, None, None], blocks, 0)


def bounds(layout: Layout, axis: int = -1) -> torch.Tensor:
    """``1 / sqrt(n)`` for each slot, float32 (capacity, 1, 1), where n elements are stored of each
    row of its block, or with ``axis`` -2 of each column; 0 of slots that hold no block."""
    twin = host.on_host(layout)
    if twin is not None:  # where no operator has to be loaded, which takes a GPU 10 ms each
        return bounds(twin, axis).to(layout.device)
    lines = layout.mask().sum(axis, dtype=torch.float32) * layout.block[axis]
    line = layout.tensors[3 if axis == -1 else 4].long()
    roots = lines.clamp(min=1.0).sqrt().reciprocal()  # rounded alike on all devices
    if not roots.numel():
        return roots.new_zeros((layout.capacity, 1, 1))
    roots = roots.index_select(0, line.clamp(min=0))
    return torch.where(line >= 0, roots, 0.0)[:, None, None]


def _count_up(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[0], dtype=torch.int64, device=like.device)


def _with(layout: Layout, at: torch.Tensor) -> torch.Tensor:
    """The mask of the blocks at these places. The place behind the last is no block."""
    size = total(layout)
    mask = torch.zeros(size + 1, dtype=torch.bool, device=at.device).index_fill_(0, at, True)
    return mask[:size].view(layout.grid)


class Watched(torch.autograd.Function):
    """``y`` as it is; its gradient and ``x`` go to ``record(grad, x)`` when it is computed."""

    @staticmethod
    def forward(ctx, y, x, record):
        ctx.record = record
        ctx.save_for_backward(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            ctx.record(grad.detach(), ctx.saved_tensors[0].detach())
        return grad, None, None
