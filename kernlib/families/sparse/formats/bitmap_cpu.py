"""The bitmap format on the CPU, some slabs at a time.

Axes of the 16 x 256 positions of a chunk, by which bits and values are ordered: row = (half, g) of
2 x 8, where g = (q, odd) of 4 x 2, and column = (block, t, plane, j) of 8 x 4 x 2 x 4.
"""

from __future__ import annotations

import numpy as np
import torch

from kernlib.families.sparse.formats import host
from kernlib.families.sparse.formats.encoding import BITS, bits
from kernlib.families.sparse.formats.entries import Slab
from kernlib.lowering.arithmetic import ceil_div

ROWS, COLUMNS, HEADER = 16, 256, 512  # of a chunk; the bytes of its bitmap
POSITIONS = ROWS * COLUMNS
UNIT = 16  # bytes that offsets count
AT_ONCE = 1 << 24  # positions that one step holds in memory, several bytes for each
# Where the four words of two rows and a block lie, for (block, q) in order. Its own reverse.
QUADS = [block * 4 + (q ^ block // 2) for block in range(8) for q in range(4)]


def chunk_counts(dense: torch.Tensor) -> torch.Tensor:
    """Entries of each chunk, int32."""
    from kernlib.families.sparse.formats.slices_dense import ENTRIES, counts

    key = ENTRIES, COLUMNS
    return chunks_of_panels(counts(dense, [key])[key])


def chunks_of_panels(entries: torch.Tensor) -> torch.Tensor:
    """Entries of each chunk from those of (panels of COLUMNS, rows)."""
    across, rows = entries.shape
    padded = torch.nn.functional.pad(entries, (0, -rows % ROWS))
    slabs = padded.view(across, ceil_div(rows, ROWS), ROWS)
    return slabs.sum(-1, dtype=torch.int32).t().reshape(-1)


def fill(dense: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor) -> None:
    """Write the chunks of a matrix, at ``offsets``, into ``data``, which holds zeros."""
    cells, out = bits(dense).numpy(), data.numpy()
    (rows, cols), itemsize = cells.shape, cells.itemsize
    across = ceil_div(cols, COLUMNS)
    starts = (offsets.long() * UNIT).tolist()

    def fill_rows(first: int, last: int) -> None:
        slabs = ceil_div(last - first, ROWS)
        some = cells[first:last]
        if some.shape != (slabs * ROWS, across * COLUMNS):
            some = np.zeros((slabs * ROWS, across * COLUMNS), cells.dtype)
            some[: last - first, :cols] = cells[first:last]
        values = _in_order(some)
        present = host.nonzero(values)
        words = _packed(present).reshape(-1, HEADER)
        ends = np.count_nonzero(present, axis=1).cumsum().tolist()
        stored, begin = values[present].view(np.uint8), 0
        for chunk, end in enumerate(ends):
            to = starts[first // ROWS * across + chunk]
            out[to : to + HEADER] = words[chunk]
            size = (end - begin) * itemsize
            out[to + HEADER : to + HEADER + size] = stored[begin * itemsize : end * itemsize]
            begin = end

    host.in_threads(fill_rows, host.some_rows(rows, cols, ROWS), cells.size)


def _in_order(cells: np.ndarray) -> np.ndarray:
    """The cells of some slabs in the order of values, (chunks, 4096). What is moved is four
    neighbours at a time."""
    kind = np.dtype((np.void, 4 * cells.itemsize)) if cells.itemsize == 4 else np.int64
    slabs, across = cells.shape[0] // ROWS, cells.shape[1] // COLUMNS
    fours = np.ascontiguousarray(cells).view(kind).reshape(slabs, 2, 8, across, 8, 4, 2)
    ordered = np.ascontiguousarray(fours.transpose(0, 3, 4, 1, 6, 2, 5))
    return ordered.reshape(-1).view(cells.dtype).reshape(-1, POSITIONS)


def _packed(present: np.ndarray) -> np.ndarray:
    """The bitmaps, (chunks, 32, 16) bytes, of positions in the order of values, (chunks, 4096)."""
    # block, half, plane, q, odd and t, of four j each
    fours = present.view(np.int32).reshape(-1, 8, 2, 2, 4, 8).transpose(0, 1, 4, 2, 3, 5)
    lines = np.ascontiguousarray(fours).view(bool).reshape(-1, 8, 4)
    words = np.packbits(lines, axis=1, bitorder="little")
    return words.reshape(-1, len(QUADS), UNIT)[:, QUADS]


def chunks_of(shape: tuple[int, int]) -> int:
    """Chunks of a matrix."""
    return ceil_div(shape[0], ROWS) * ceil_div(shape[1], COLUMNS)


def chunks_of_entries(slab: Slab, across: int) -> torch.Tensor:
    """The chunk of each entry, counted from the first one of the slab's rows."""
    return slab.rows // ROWS * across + slab.columns // COLUMNS


def fill_entries(slab: Slab, offsets: torch.Tensor, across: int, data: torch.Tensor) -> None:
    """:func:`fill` of some rows by their entries, all other than 0. On any device."""
    chunk, column = chunks_of_entries(slab, across), slab.columns % COLUMNS
    half, g = slab.rows % ROWS // 8, slab.rows % 8
    block, t, plane, j = column // 32, column % 32 // 8, column % 8 // 4, column % 4
    place = ((((block * 2 + half) * 2 + plane) * 8 + g) * 4 + t) * 4 + j
    start = offsets[chunk].long() * UNIT
    word = (block * 4 + (g // 2 ^ block // 2)) * 4 + half * 2 + plane
    data.index_add_(0, start + word * 4 + j, (1 << (g % 2 * 4 + t)).to(torch.uint8))
    order = (chunk * POSITIONS + place).argsort()
    chunk, start = chunk[order], start[order]
    number = torch.arange(chunk.numel(), dtype=torch.int64, device=chunk.device)
    number -= torch.searchsorted(chunk, chunk)  # behind the first of its chunk
    values = data.view(slab.bits.dtype)
    values[(start + HEADER) // values.element_size() + number] = slab.bits[order]


def read_entries(
    data: torch.Tensor, starts: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """For each value in the chunks at ``starts``: the number of the chunk among these, row and
    column in it, and bits. On any device."""
    present = positions(data.view(-1, UNIT)[headers(starts)])
    chunk, place = present.nonzero(as_tuple=True)
    j, t, g = place % 4, place // 4 % 4, place // 16 % 8
    plane, half, block = place // 128 % 2, place // 256 % 2, place // 512
    values = data.view(BITS[dtype])[_places(starts, present.sum(-1), dtype.itemsize)]
    return chunk, half * 8 + g, block * 32 + t * 8 + plane * 4 + j, values


def decode(
    data: torch.Tensor, offsets: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The dense matrix of chunks."""
    out = torch.zeros(shape, dtype=dtype, device=data.device)
    across = _across(shape)
    written, stored = bits(out), data.view(BITS[dtype])
    for top in range(0, shape[0], _step(across)):
        part = written[top : top + _step(across)]
        slabs = ceil_div(part.shape[0], ROWS)
        first = top // ROWS * across
        starts = offsets[first : first + slabs * across].long()
        present = positions(data.view(-1, UNIT)[headers(starts)])
        values = stored.new_zeros(slabs * across, POSITIONS)
        places = _places(starts, present.sum(-1), stored.element_size())
        values.masked_scatter_(present, stored[places])
        tiled = values.view(slabs, across, 8, 2, 2, 8, 4, 4).permute(0, 3, 5, 1, 2, 6, 4, 7)
        tiled = tiled.reshape(slabs * ROWS, across * COLUMNS)
        part.copy_(tiled[: part.shape[0], : part.shape[1]])
    return out


def _across(shape: tuple[int, int]) -> int:
    """Chunks of a slab."""
    return ceil_div(shape[1], COLUMNS)


def _step(across: int) -> int:
    """Rows of a block: whole slabs."""
    return max(1, AT_ONCE // (POSITIONS * max(1, across))) * ROWS


def headers(starts: torch.Tensor) -> torch.Tensor:
    """The units of the bitmaps of chunks at ``starts``, (chunks, 32)."""
    units = torch.arange(HEADER // UNIT, dtype=torch.int64, device=starts.device)
    return starts[:, None] + units


def positions(words: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`_packed`."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    lines = (words[:, QUADS, :, None] >> places) & 1
    # block, q, half, plane, j, odd, t
    axes = lines.bool().view(-1, 8, 4, 2, 2, 4, 2, 4)
    return axes.permute(0, 1, 3, 4, 2, 6, 7, 5).reshape(-1, POSITIONS)


def inside(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """Which positions of a chunk, in the order of values, are of its first rows and columns."""
    mask = torch.zeros(ROWS, COLUMNS, dtype=torch.bool, device=device)
    mask[:rows, :cols] = True
    return mask.view(2, 8, 8, 4, 2, 4).permute(2, 0, 4, 1, 3, 5).reshape(-1)


def _places(starts: torch.Tensor, counts: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Where the values of chunks at ``starts`` lie, in elements of the whole of data."""
    first = (starts * UNIT + HEADER) // itemsize
    before = counts.cumsum(0) - counts
    numbers = torch.arange(int(counts.sum()), dtype=torch.int64, device=counts.device)
    return (first - before).repeat_interleave(counts) + numbers
