"""Block-sparse products on a CPU, of the stored blocks alone: neither what they do not meet nor a
slot without a block is read, and 0 is where no block is.

The result's lines of blocks are sorted by falling length, and each step takes one block of every
line: its products are one of torch's batched products, added to the sums of the steps before. The
order is cached with the layout's contents, as finding it takes longer than small products do.
Values are not cached: many write a parameter by its ``data``, which torch does not count."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime.tensors import broadcast_shapes, stand_ins

AT_ONCE = 1 << 19  # numbers that are brought together for some blocks: they stay in a cache


class _Order(NamedTuple):
    """The order in which the slots that hold blocks are added to lines."""

    steps: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # slots, and the lines that they meet
    slots: torch.Tensor  # those that hold blocks, line after line
    starts: torch.Tensor  # the first of each line's
    meets: torch.Tensor  # the lines that all slots meet, 0 for a slot without a block
    place: torch.Tensor | None  # of each line among those by falling length; None for its own


class _Kept(NamedTuple):
    tensor: weakref.ref  # whose end ends this
    state: tuple | None  # of the layout when it was looked at
    orders: dict[bool, _Order]  # by whether the lines are columns
    copies: list[Layout]  # with these contents, one at most


_kept: dict[int, _Kept] = {}  # by the id of a layout's tensor of rows, which copies of it share
_settled: weakref.WeakSet[Layout] = weakref.WeakSet()


def takes(*tensors: torch.Tensor) -> bool:
    """Whether these are computed here: on a CPU, where they lie, and outside of transforms."""
    if forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        return False
    if stand_ins(*tensors):
        return False
    return all([t.is_cpu and not is_legacy_batchedtensor(t) for t in tensors])


def multiply(
    layout: Layout, values: torch.Tensor, dense: torch.Tensor, transposed: bool, right: bool
) -> torch.Tensor:
    """``op(S) dense``, or ``dense op(S)`` where S stands at the ``right``, for each head."""
    if not right and dense.shape[-1] == 1:  # rows times matrices take torch a third of the time
        return multiply(layout, values, dense.mT, not transposed, True).mT
    if right and values.dim() == 3 and dense.dim() > 2 and layout.heads is None:
        y = multiply(layout, values, dense.flatten(0, -2), transposed, right)
        return y.unflatten(0, dense.shape[:-1])
    blocks = values.mT if transposed else values
    by_columns = transposed != right
    order, lines = order_of(layout, by_columns), _count(layout, by_columns)
    panels = _panels(layout, dense, blocks.shape[-2 if right else -1], right)
    columns, size = panels.shape[-2 if right else -1], blocks.shape[-1 if right else -2]
    if 0 < columns <= size and blocks.dim() == panels.dim() == 3 and order.steps:
        y = _parts(order, blocks, panels, right)
    else:
        y = _steps(order, blocks, panels, lines, right)
    return _whole(layout, y, right)


def sampled(layout: Layout, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The stored blocks of ``left right``, for each head, 0 in slots without a block."""
    across, rows = order_of(layout, False), order_of(layout, True).meets
    lead = broadcast_shapes(left.shape[:-2], right.shape[:-2])
    if layout.heads is not None:
        lead = lead[:-1]
    y = left.new_zeros(*lead, layout.capacity, *layout.block)
    if not across.steps:
        return y
    left = _panels(layout, left, layout.block[0], False)
    right = _panels(layout, right, layout.block[1], True)
    per_block = left[..., :1, :, :].numel() + right[..., :1, :, :].numel()
    count = max(1, AT_ONCE // max(per_block, 1))
    parts = zip(y.split(count, -3), rows.split(count), across.meets.split(count), strict=True)
    for part, row, column in parts:
        first, second = _selected(left, row), _selected(right, column)
        if lead:
            part.copy_(first @ second)
        else:
            torch.bmm(first, second, out=part)
    if across.slots.numel() < layout.capacity:
        y.masked_fill_((layout.tensors[3] < 0)[:, None, None], 0.0)
    return y


def order_of(layout: Layout, by_columns: bool) -> _Order:
    """The order of the lines of a layout, its rows or its columns."""
    orders = _kept_of(layout).orders
    order = orders.get(by_columns)
    if order is None:
        with torch.inference_mode(False), torch.no_grad():
            order = _ordered(layout, by_columns)
        if not stand_ins(order.slots):  # as inside of a mode of fake tensors
            orders[by_columns] = order
    return order


def settled(layout: Layout) -> Layout:
    """The layout with its present contents, which are not written any more: for gradients, whose
    products come later."""
    if layout in _settled:
        return layout
    copies = _kept_of(layout).copies
    if not copies:
        with torch.inference_mode(False), torch.no_grad():
            copy = Layout.from_layout(layout.text, tuple(t.clone() for t in layout.tensors))
        if stand_ins(*copy.tensors):
            return copy
        copies.append(copy)
        _settled.add(copy)
    return copies[0]


def _kept_of(layout: Layout) -> _Kept:
    """The cache entry of a layout's present contents. That of inference mode is not cached."""
    key, state = layout.tensors[3], _state_of(layout)
    identity = id(key)
    entry = _kept.get(identity)
    if entry is None or entry.tensor() is not key or entry.state != state or state is None:
        forget = _kept.pop  # names of the module are gone when a process ends
        entry = _Kept(weakref.ref(key, lambda _: forget(identity, None)), state, {}, [])
        if state is not None:
            _kept[identity] = entry
    return entry


def _state_of(layout: Layout) -> tuple | None:
    """The sizes, where the contents lie and how often they were written; None where torch does not
    count."""
    _, _, _, rows, cols, _ = layout.tensors
    try:
        return layout.text, rows.data_ptr(), rows._version, cols.data_ptr(), cols._version
    except RuntimeError:
        return None


def _ordered(layout: Layout, by_columns: bool) -> _Order:
    rows, across = lines_of(layout)
    lines, meets = (across, rows) if by_columns else (rows, across)
    count = _count(layout, by_columns)
    slots = (rows >= 0).nonzero().flatten()
    slots = slots[lines[slots].argsort(stable=True)]
    slot_lines = lines[slots]
    lengths = slot_lines.bincount(minlength=count)
    starts = lengths.cumsum(0) - lengths
    by_length = lengths.argsort(descending=True, stable=True)
    place = by_length.argsort()
    rank = _numbers(slots.numel()) - starts[slot_lines]
    ranked = slots[(rank * count + place[slot_lines]).argsort()]
    sizes = rank.bincount().tolist()
    steps = tuple(zip(ranked.split(sizes), meets[ranked].split(sizes), strict=True))
    same = torch.equal(place, _numbers(count))
    return _Order(steps, slots, starts, meets.clamp(min=0), None if same else place)


def _numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _count(layout: Layout, by_columns: bool) -> int:
    return (layout.heads or 1) * layout.grid[1 if by_columns else 0]


def lines_of(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """The row and the column of blocks of each slot, counted through all heads."""
    rows, cols = (t.long() for t in layout.tensors[3:5])
    head = torch.div(rows, max(layout.grid[0], 1), rounding_mode="floor")
    return rows, head * layout.grid[1] + cols


def _panels(layout: Layout, dense: torch.Tensor, depth: int, right: bool) -> torch.Tensor:
    """The lines of blocks of a dense matrix (..., lines, depth, columns), those of all heads one
    after another; where S stands at its right, (..., lines, rows, depth)."""
    if layout.heads is not None:
        dense = dense.expand(*dense.shape[:-3], layout.heads, *dense.shape[-2:])
    shape, size = dense.shape[:-2], dense.shape[-1 if right else -2] // depth
    if right:
        panels = dense.reshape(*shape, dense.shape[-2], size, depth).transpose(-3, -2)
    else:
        panels = dense.reshape(*shape, size, depth, dense.shape[-1])
    return panels if layout.heads is None else panels.flatten(-4, -3)


def _selected(matrices: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Some of these matrices, each copied as it lies, by rows or by columns."""
    if matrices.stride(-1) > 1 and matrices.stride(-2) == 1:
        return matrices.mT.index_select(-3, index).mT
    return matrices.index_select(-3, index)


def _product(blocks: torch.Tensor, panels: torch.Tensor, right: bool) -> torch.Tensor:
    first, second = (panels, blocks) if right else (blocks, panels)
    return torch.bmm(first, second) if first.dim() == second.dim() == 3 else first @ second


def _steps(order: _Order, blocks, panels, lines: int, right: bool) -> torch.Tensor:
    """The lines of the result, of blocks that are brought together step by step."""
    first, second = (panels, blocks) if right else (blocks, panels)
    lead = broadcast_shapes(blocks.shape[:-3], panels.shape[:-3])
    y = blocks.new_zeros(*lead, lines, first.shape[-2], second.shape[-1])
    for slots, meets in order.steps:
        part = y.narrow(-3, 0, slots.numel())
        block, panel = _selected(blocks, slots), _selected(panels, meets)
        if lead:
            part += _product(block, panel, right)
        elif right:
            part.baddbmm_(panel, block)
        else:
            part.baddbmm_(block, panel)
    return y if order.place is None else y.index_select(-3, order.place)


def _parts(order: _Order, blocks, panels, right: bool) -> torch.Tensor:
    """:func:`_steps` for so few columns that products are no larger than blocks: all blocks are
    multiplied at once and then summed."""
    parts = _product(blocks, _selected(panels, order.meets), right)
    # As F.embedding_bag of mode "sum", which takes 5 us more to check what cannot be wrong here.
    y = torch.embedding_bag(parts.flatten(1), order.slots, order.starts)[0]
    return y.view(-1, *parts.shape[-2:])


def _whole(layout: Layout, y: torch.Tensor, right: bool) -> torch.Tensor:
    """Lines of blocks (..., lines, rows, columns) as the matrices that they are."""
    if layout.heads is not None:
        y = y.unflatten(-3, (layout.heads, y.shape[-3] // layout.heads))
    return y.transpose(-3, -2).flatten(-2) if right else y.flatten(-3, -2)
