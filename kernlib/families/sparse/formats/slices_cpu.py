"""The formats u8, u4 and u2 on CPU tensors, and of entries on any device, by torch.

See :mod:`kernlib.families.sparse.formats.slices`; what a function calls ``code`` is its ``Code``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch

from kernlib.families.sparse.formats import slices_dense as dense_codes
from kernlib.families.sparse.formats.encoding import BITS, bits, nonzero
from kernlib.families.sparse.formats.entries import CELLS, SLAB, Entries, Slab, Triplets
from kernlib.families.sparse.formats.tiling import Tiling
from kernlib.families.sparse.lowering.codes import LANES, Code
from kernlib.lowering.arithmetic import ceil_div

GROUPS = 1 << 16  # whose steps are looked at together


def count(code: Code, dense: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of each (panel, row): int32."""
    return counts(code, dense, (width,))[width]


def counts(code: Code, dense: torch.Tensor, widths: Iterable[int]) -> dict[int, torch.Tensor]:
    """:func:`count` by the widths of panels, in one pass."""
    steps = dense_codes.Steps.of(code)
    lengths = dense_codes.counts(dense, [(steps, width) for width in widths])
    return {width: lengths[steps, width] for width in widths}


def write(
    code: Code,
    dense: torch.Tensor,
    tiling: Tiling,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    data: torch.Tensor,
) -> None:
    """Write all codes into ``data`` and the starts of parts into ``rows``, zero before."""
    steps = dense_codes.write(code, dense, tiling, offsets, numbers(rows), data)
    _write_starts(tiling.parts, steps, rows)


def count_entries(code: Code, entries: Entries, width: int, panels: slice) -> torch.Tensor:
    """:func:`count` of some panels of a matrix by its entries. On any device."""
    count, rows = panels.stop - panels.start, entries.shape[0]
    lengths = torch.zeros(count * rows, dtype=torch.int32, device=entries.device)
    for slab in entries.slabs():
        panel, row, _, _, steps = _of_panels(code, slab, width, panels)
        counts = codes_of(code, steps).to(torch.int32)
        lengths.index_add_(0, (panel - panels.start) * rows + row, counts)
    return lengths.view(count, rows)


def write_entries(
    code: Code,
    entries: Entries,
    tiling: Tiling,
    panels: slice,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    data: torch.Tensor,
) -> None:
    """:func:`write` of some panels of a matrix by its entries. On any device."""
    slots, slices = _slots(rows[panels], entries.shape[0]), rows.shape[1]
    for slab in entries.slabs():
        panel, row, columns, values, steps = _of_panels(code, slab, tiling.width, panels)
        place = panel * slices * LANES + slots[panel - panels.start, row]
        begins = torch.ones_like(row)
        begins[1:] = (row[1:] != row[:-1]) | (panel[1:] != panel[:-1])
        group = begins.cumsum(0) - 1
        _put(code, tiling.parts, _Codes(values, group, columns, steps, place), offsets, data)
    if tiling.parts > 1:
        steps = steps_of_parts(code, tiling.parts, entries.dtype.itemsize, offsets, data)
        _write_starts(tiling.parts, steps, rows)


class _Codes(NamedTuple):
    """Entries of rows of panels, one behind the other: the bits of each, the number of its row of a
    panel, its column there, the step to it, and the lane it lies in, counted through all slices."""

    values: torch.Tensor
    group: torch.Tensor
    columns: torch.Tensor
    steps: torch.Tensor
    place: torch.Tensor


def _put(
    code: Code, parts: int, entries: _Codes, offsets: torch.Tensor, data: torch.Tensor
) -> None:
    values_of, group, columns, steps, place = entries
    if not group.numel():
        return
    values, itemsize = data.view(values_of.dtype), values_of.element_size()
    code_counts = codes_of(code, steps)
    counts = group.new_zeros(int(group[-1]) + 1).index_add_(0, group, code_counts)
    number = code_counts.cumsum(0) - 1 - (counts.cumsum(0) - counts)[group]
    lane, slice_of = place & LANES - 1, place >> LANES.bit_length() - 1
    start = offsets[slice_of].long()
    base, length = start * code.size(itemsize), offsets[slice_of + 1].long() - start
    before = number - code_counts
    if code.least:  # what fills up the row comes first
        lacking = length - counts[group]
        number = torch.minimum(number + lacking, columns)
        before = torch.minimum(before + lacking, columns - steps)
    value, _, _ = places(code, number, length, lane, itemsize, parts)
    values[base + value >> itemsize.bit_length() - 1] = values_of
    for some in _parts(code_counts):
        owner, of_code, step = _divided(code, steps[some], before[some], number[some])
        lengths, lanes = length[some][owner], lane[some][owner]
        _, at, shift = places(code, of_code, lengths, lanes, itemsize, parts)
        data.index_add_(0, base[some][owner] + at, (step << shift).to(torch.uint8))


def _write_starts(parts: int, steps: torch.Tensor, rows: torch.Tensor) -> None:
    """The column of the code before each part, or of u2 the next one, by the sums of the steps of
    each part, (..., parts, lanes)."""
    if parts > 1:
        starts = steps.cumsum(-2) - steps
        stored = starts.to(torch.int16).view(torch.uint8) if rows.dtype == torch.uint8 else starts
        rows[..., per_slice(rows.dtype) :] = stored.reshape(*rows.shape[:2], -1)


def steps_of_parts(
    code: Code, parts: int, itemsize: int, offsets: torch.Tensor, data: torch.Tensor
) -> torch.Tensor:
    """Sums of the steps of each part of all lanes, (slices, parts, lanes). On any device."""
    lengths = offsets.long().diff() // parts
    bounds = torch.nn.functional.pad(lengths.repeat_interleave(parts).cumsum(0), (1, 0))
    steps = _stored_steps(code, data, bounds, itemsize).view(-1, parts, LANES)
    return steps + code.least * lengths[:, None, None]


def _parts(counts: torch.Tensor) -> Iterator[slice]:
    """All entries, as many at a time as make SLAB codes, which may be hundreds for each."""
    ends = counts.cumsum(0)
    count = ceil_div(int(ends[-1]), SLAB)
    marks = torch.arange(1, count, dtype=torch.int64, device=counts.device) * SLAB
    bounds = [0, *torch.searchsorted(ends, marks).tolist(), counts.numel()]
    for first, last in pairwise(bounds):
        yield slice(first, last)


def _slots(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The lane, counted through the slices of its panel, of each of ``count`` rows, (panels, rows),
    as ``rows`` of some panels say it."""
    row = numbers(rows).flatten(1)
    lane = torch.arange(row.shape[1], dtype=torch.int64, device=rows.device)
    slots = row.new_empty(len(row), count + 1)  # the last one of lanes without a row
    return slots.scatter_(1, torch.where(row < 0, count, row), lane.expand_as(row))


def read(
    code: Code, tensors: Mapping[str, torch.Tensor], tiling: Tiling, dense: torch.Tensor
) -> None:
    """Write the matrix into ``dense``, contiguous."""
    flat, cols = bits(dense).view(-1).zero_(), dense.shape[1]
    for rows, columns, values in _read(code, tensors, tiling, cols, dense.dtype):
        flat[rows * cols + columns] = values


def read_entries(
    code: Code, tensors: Mapping[str, torch.Tensor], tiling: Tiling, cols: int, dtype: torch.dtype
) -> Iterator[Triplets]:
    """The entries that are not 0 of a matrix with so many columns. On any device."""
    for triplets in _read(code, tensors, tiling, cols, dtype):
        mask = nonzero(triplets.bits)
        yield Triplets(*(part[mask] for part in triplets))


def _read(
    code: Code, tensors: Mapping[str, torch.Tensor], tiling: Tiling, cols: int, dtype: torch.dtype
) -> Iterator[Triplets]:
    """The entries with nonzero bits, some slices of a panel at a time."""
    itemsize, rows, data = dtype.itemsize, tensors["rows"], tensors["data"]
    if data.storage_offset() % itemsize:
        data = data.clone()
    starts, slices = tensors["offsets"], rows.shape[1]
    values = data.view(BITS[dtype])
    lanes = torch.arange(LANES, dtype=torch.int64, device=data.device)
    for low, high in _some_slices(starts, slices):
        bounds = starts[low : high + 1].long()
        lengths, first = bounds.diff(), bounds[:-1] - bounds[0]
        place = torch.repeat_interleave(lengths)
        number = torch.arange(len(place), dtype=torch.int64, device=data.device)
        number = (number - first[place])[:, None]
        base = (bounds[:-1] * code.size(itemsize))[place][:, None]
        length = lengths[place][:, None]
        value, step, shift = places(code, number, length, lanes, itemsize, tiling.parts)
        entries = values[(base + value) // itemsize]
        column = (data[base + step].to(torch.int64) >> shift & code.mask).cumsum(0)
        before = torch.nn.functional.pad(column, (0, 0, 1, 0))[first[place]]
        panel = ((low + place) // slices)[:, None]
        column = column - before + number * code.least + panel * tiling.width
        row = numbers(rows.view(-1, rows.shape[-1])[low:high])[place]
        real = (entries != 0) & (column < cols) & (row >= 0)
        yield Triplets(row[real], column[real], entries[real])


def _some_slices(starts: torch.Tensor, slices: int) -> Iterator[tuple[int, int]]:
    """All slices, as many at a time as have SLAB codes, or CELLS of them: or else one."""
    low, count = 0, starts.numel() - 1
    while low < count:
        most = min(int(starts[low]) + SLAB // LANES, int(starts[-1]))
        high = int(torch.searchsorted(starts, most, right=True)) - 1
        high = min(max(high, low + 1), low + CELLS, count)
        yield low, high
        low = high


def _stored_steps(
    code: Code, data: torch.Tensor, offsets: torch.Tensor, itemsize: int
) -> torch.Tensor:
    """Sums of the steps, as they are stored, of lanes whose codes lie between two offsets,
    (offsets - 1, lanes), by a byte at a time."""
    shifts = torch.arange(0, 8, code.bits, dtype=torch.int64, device=data.device)
    by_byte = torch.arange(256, dtype=torch.int64, device=data.device)
    by_byte = (by_byte[:, None] >> shifts & code.mask).sum(1)
    lengths, base = offsets.diff(), offsets[:-1] * code.size(itemsize)
    sums = torch.zeros(len(lengths), LANES, dtype=torch.int64, device=data.device)
    count = code.group
    while count * code.bits >= 8:
        first, groups = lengths & -2 * count, (lengths & count) // count
        if count == code.group:
            first, groups = torch.zeros_like(lengths), lengths // count
        owner = torch.repeat_interleave(groups)
        inside = torch.arange(len(owner), dtype=torch.int64, device=data.device)
        inside -= (groups.cumsum(0) - groups)[owner]
        begin = base[owner] + (first[owner] + inside * count) * code.size(itemsize)
        wide = LANES * count * code.bits // 8
        places = torch.arange(wide, dtype=torch.int64, device=data.device)
        places += LANES * count * itemsize
        for some, at in zip(owner.split(GROUPS), begin.split(GROUPS), strict=True):
            steps = by_byte[data[at[:, None] + places].long()]
            sums.index_add_(0, some, steps.view(len(some), LANES, count * code.bits // 8).sum(2))
        count //= 2
    return sums


def per_slice(dtype: torch.dtype) -> int:
    """Elements of ``rows`` that say one number of each lane."""
    return 2 * LANES if dtype == torch.uint8 else LANES


def numbers(rows: torch.Tensor) -> torch.Tensor:
    """Rows of lanes, (..., lanes), int64, -1 for none."""
    integers = _integers(rows[..., : per_slice(rows.dtype)])
    return torch.where(integers == 0xFFFF, -1, integers) if rows.dtype == torch.uint8 else integers


def starts(rows: torch.Tensor) -> torch.Tensor:
    """Where parts begin, (..., parts, lanes), int64; of no part if rows are not cut."""
    return _integers(rows[..., per_slice(rows.dtype) :]).unflatten(-1, (-1, LANES))


def _integers(held: torch.Tensor) -> torch.Tensor:
    if held.dtype != torch.uint8:
        return held.to(torch.int64)
    pairs = held.unflatten(-1, (held.shape[-1] // 2, 2)).to(torch.int64)
    return pairs[..., 0] | pairs[..., 1] << 8


def places(
    code: Code,
    numbers: torch.Tensor,
    lengths: torch.Tensor,
    lanes: torch.Tensor,
    itemsize: int,
    parts: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes from a slice's beginning to value and step of a lane's codes by their numbers, for the
    slice's length, and the bit at which the step begins."""
    if parts > 1:
        lengths = lengths // parts
        part, numbers = numbers // lengths, numbers % lengths
        before = part * lengths * code.size(itemsize)
        values, steps, bits = places(code, numbers, lengths, lanes, itemsize)
        return before + values, before + steps, bits
    # All sizes here are powers of two: masks and shifts take a tenth of the time of divisions.
    at = lengths & -code.group
    first, count = numbers & -code.group, torch.full_like(numbers, code.group)
    for size in (code.group // 2, code.group // 4, code.group // 8):
        here = (numbers >= at) & (numbers < at + size) & (lengths & size != 0)
        first, count = torch.where(here, at, first), torch.where(here, size, count)
        at = at + (lengths & size)
    group, inside, part = first * code.size(itemsize), numbers - first, count.clamp_max(8)
    values = group + ((inside & -8) * LANES + lanes * part + (inside & 7)) * itemsize
    lane_bytes = count * code.bits >> 3  # bytes of a lane's steps
    steps = group + count * (LANES * itemsize) + lanes * lane_bytes + (inside & lane_bytes - 1)
    if code.bits == 8:
        return values, steps, torch.zeros_like(inside)
    shift = (
        inside >> (lane_bytes >> 1)
    ) * code.bits  # taken is 1, 2 or 4, whose logarithm is half of it
    return values, steps, shift


def codes_of(code: Code, steps: torch.Tensor) -> torch.Tensor:
    """Codes that each step takes."""
    if code.longest & code.longest - 1 == 0:
        return ((steps - 1).clamp_min(0) >> code.longest.bit_length() - 1) + 1
    return (steps - 1).clamp_min(0) // code.longest + 1


def _of_panels(code: Code, slab: Slab, width: int, panels: slice) -> tuple[torch.Tensor, ...]:
    """Panel, row, column there, bits and step of each entry that is not 0 of some panels, in order.
    Each row of a panel begins anew."""
    slab = slab.present()
    panel = slab.columns // width
    if panels.start or int(panel.max() if panel.numel() else 0) >= panels.stop:
        mask = (panel >= panels.start) & (panel < panels.stop)
        panel, slab = panel[mask], slab.where(mask)
    row, columns = slab.first + slab.rows, slab.columns - panel * width
    steps = columns + code.least
    is_next = (row[1:] == row[:-1]) & (panel[1:] == panel[:-1])
    steps[1:] -= torch.where(is_next, columns[:-1] + code.least, 0)
    return panel, row, columns, slab.bits, steps


def _divided(
    code: Code, steps: torch.Tensor, before: torch.Tensor, number: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """For each code whose step has bits: the entry that it leads to, its number and those bits. An
    entry's codes are those behind ``before`` up to ``number``; the first ones take the longest."""
    remaining = steps - code.least * (number - before)
    count = (remaining + code.mask - 1) // code.mask
    owner = torch.repeat_interleave(count)
    index = torch.arange(len(owner), dtype=torch.int64, device=owner.device)
    index -= (count.cumsum(0) - count)[owner]
    step_bits = (remaining[owner] - code.mask * index).clamp_max(code.mask)
    return owner, before[owner] + 1 + index, step_bits
