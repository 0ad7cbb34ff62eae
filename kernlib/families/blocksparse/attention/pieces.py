"""A call in pieces, each with few enough logits for memory: some heads, some rows, and the columns
that any of these rows stores.

Tensors are (batch, key heads, query heads of each, rows, columns, ...), of size 1 along what they
do not depend on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _is_tracing
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.families.blocksparse.attention.arguments import Sizes
from kernlib.families.blocksparse.attention.descriptor import AXES
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime.tensors import stand_ins

MOST = 1 << 22  # logits of a piece, 16 MiB in float32
# Stored blocks beyond which a piece has all columns: gathering keys takes longer than their use.
DENSE = 0.5
ALL = slice(None)
COLUMNS = 4  # their dimension


class Piece(NamedTuple):
    """Slices of batch, key heads and query heads, rows from the first one on, and the columns in
    order, None for all of them."""

    batch: slice
    kv_head: slice
    member: slice
    rows: slice
    cols: torch.Tensor | None

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The piece's part of a tensor: a view, or a copy of columns."""
        part = t[self._index(t)]
        if self.cols is None or t.shape[COLUMNS] == 1:
            return part
        return part.index_select(COLUMNS, self.cols)

    def add(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Add to the piece's part of a tensor."""
        place = total[self._index(total)]
        if self.cols is None or total.shape[COLUMNS] == 1:
            place += part
        else:
            place.index_add_(COLUMNS, self.cols, part)

    def _index(self, t: torch.Tensor) -> tuple:
        slices = self.batch, self.kv_head, self.member, self.rows
        sizes = t.shape[:COLUMNS]
        return tuple(ALL if n == 1 else part for n, part in zip(sizes, slices, strict=True))


def arranged(t: torch.Tensor, axes: tuple[str, ...], sizes: Sizes) -> torch.Tensor:
    """A captured tensor with the dimensions of pieces, a view where it can be."""
    places = {axis: place for place, axis in enumerate(axes)}
    order = [places[axis] for axis in AXES if axis in places]
    shape = [t.shape[places[axis]] if axis in places else 1 for axis in ("batch", "row", "col")]
    heads = t.shape[places["head"]] if "head" in places else 1
    pair = (1, 1) if heads == 1 else (sizes.kv_heads, sizes.group)
    return t.permute(order).reshape(shape[0], *pair, *shape[1:])


def restored(t: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """A tensor with the dimensions of pieces as a captured one of these axes."""
    batch, kv_heads, group, rows, cols = t.shape
    merged = t.reshape(batch, kv_heads * group, rows, cols)
    for place in reversed(range(len(AXES))):
        if AXES[place] not in axes:
            merged = merged.squeeze(place)
    present = [axis for axis in AXES if axis in axes]
    return merged.permute([present.index(axis) for axis in axes])


def summed(part: torch.Tensor, axes: tuple[str, ...], like: torch.Tensor) -> torch.Tensor:
    """The gradient by a captured tensor, summed from the kernels' result for each batch and
    head."""
    sizes = [like.shape[axes.index(axis)] if axis in axes else 1 for axis in AXES]
    total = part.sum_to_size(sizes)
    return restored(total[:, :, None], axes).reshape(like.shape).to(like.dtype)


def stored(layout: Layout, sizes: Sizes) -> torch.Tensor:
    """Whether each block is stored, with the dimensions of pieces."""
    mask = layout.mask()
    if layout.heads is None:
        return mask[None, None, None]
    batch = sizes.batch if layout.heads != sizes.heads else 1
    return mask.reshape(batch, sizes.kv_heads, sizes.group, *layout.grid)


def may_look(layout: Layout) -> bool:
    """Whether the contents are in host memory and reading them is not recorded."""
    if layout.device.type != "cpu" or stand_ins(*layout.tensors):
        return False
    return not (is_in_torch_dispatch_mode() or _is_tracing())


def pieces(layout: Layout, sizes: Sizes, left: int, right: int) -> list[list[Piece]]:
    """All pieces: for each head of the layout, or for all at once, those of its rows in order.
    ``left`` and ``right`` are how far columns may be from their row."""
    if not may_look(layout) or layout.density > DENSE:
        rows = _rows(sizes, sizes.batch * sizes.heads * sizes.keys)
        return [
            [Piece(ALL, ALL, ALL, slice(n, n + rows), None) for n in range(0, sizes.queries, rows)]
        ]
    masks = stored(layout, sizes)
    groups = []
    for place in range(masks.shape[:3].numel()):
        head = [slice(n, n + 1) for n in _place(place, masks.shape[:3])]
        if layout.heads is None:
            head = [ALL] * 3
        elif layout.heads == sizes.heads:
            head[0] = ALL
        mask = masks.reshape(-1, *layout.grid)[place]
        groups.append(_of_head(layout, sizes, mask, head, (left, right)))
    return groups


def _place(number: int, shape: torch.Size) -> tuple[int, int, int]:
    _, kv_heads, group = shape
    return number // (kv_heads * group), number // group % kv_heads, number % group


def _of_head(layout: Layout, sizes: Sizes, mask, head: list, sides: tuple) -> list[Piece]:
    """The pieces of one mask (RB, CB)."""
    height, width = layout.block
    columns = torch.arange(width, dtype=torch.int64, device="cpu")
    heads = 1 if head[1] != ALL else sizes.heads
    batch = 1 if head[0] != ALL else sizes.batch
    listed = []
    for line, stored_here in enumerate(mask):
        first, last = line * height, min((line + 1) * height, sizes.queries)
        blocks = stored_here.nonzero().flatten()
        near = blocks * width <= last - 1 + sides[1]
        blocks = blocks[near & (blocks * width + width - 1 >= first - sides[0])]
        if not len(blocks):
            blocks = torch.zeros(1, dtype=torch.int64, device="cpu")  # which masks leave nothing of
        cols = (blocks[:, None] * width + columns).flatten()
        cols = cols[cols < sizes.keys]
        rows = _rows(sizes, batch * heads * len(cols))
        starts = range(first, last, rows)
        listed += [Piece(*head, slice(n, min(n + rows, last)), cols) for n in starts]
    return listed


def _rows(sizes: Sizes, logits: int) -> int:
    """How many rows of so many logits each a piece has."""
    return max(1, min(sizes.queries, MOST // max(1, logits)))
