"""The bitmap format: one bit for each position, and the values that are not zero.

A chunk is 16 rows x 256 columns, chunks in order ``row // 16 * ceil_div(C / 256) + col // 256``.
``offsets``, int32, counts 16-byte units into ``data``, uint8, where chunks begin and the last ends.
Each has 128 little-endian words of 32 bits, the values, and zeros up to whole 16 bytes. Of row r of
16 and column c of a block b of 32 columns (8 blocks), with

    half = r // 8,  g = r % 8,  q = g // 2,  t = c // 8,  plane = c % 8 // 4,  j = c % 4

- the word is number ``(b * 4 + (q ^ b // 2)) * 4 + half * 2 + plane``, and in it the bit
  ``8 * j + g % 2 * 4 + t``, 0 beyond the matrix's edges;
- values are in the order of ``(b, half, plane, g, t, j)``.

So a lane's share of ``m16n8k16`` fragments, row g and the columns of t, has its bits in the bytes
of a word and its values in runs of up to four: kernel_sources/sparse/bitmap/fragments.cuh.

An entry is whatever does not equal zero, NaN included, and comes back bit by bit. -0.0 is no entry
and comes back as 0.0: ``w * mask`` makes -0.0 of every pruned negative value.

Bits in place of positions are SpInfer's idea. 16-bit values take ``2 nnz + R C / 8 + R C / 1024``
bytes and some 7 of padding a chunk: fewer than MACKO's codes from a density of 0.233 up, and than
the dense matrix below 0.93.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.sparse.formats import bitmap_cpu as cpu
from kernlib.families.sparse.formats import encoding
from kernlib.families.sparse.formats.bitmap_cpu import (
    COLUMNS,
    HEADER,
    POSITIONS,
    ROWS,
    UNIT,
    chunks_of,
)
from kernlib.families.sparse.formats.encoding import readable
from kernlib.families.sparse.formats.entries import CELLS, Entries, Slab, Triplets
from kernlib.lowering.arithmetic import ceil_div
from kernlib.runtime.rehearsal import on_gpu

FORMAT = "bitmap"
TENSORS = ("data", "offsets")
MOST_BYTES = UNIT * 2**31  # offsets do not reach further
CHECKED = 1 << 16  # chunks whose bits are counted together: 32 MiB, several times
SPREAD = 1 << 12  # whose positions are looked at one by one: 16 MiB, several times


def chunk_counts(dense: torch.Tensor) -> torch.Tensor:
    """Entries of each chunk, int32, on the device of the matrix, without a synchronisation."""
    if dense.device.type == "cpu":
        return cpu.chunk_counts(dense)
    return _gpu().chunk_counts(dense)


def chunk_units(counts: torch.Tensor, itemsize: int) -> torch.Tensor:
    """The 16-byte units of chunks with so many entries."""
    return (counts * itemsize + (HEADER + UNIT - 1)).div_(UNIT, rounding_mode="floor")


def measure(dense: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Bytes that :func:`encode` would take, given :func:`chunk_counts`: one number, int64, where
    these lie; below 0 if the format cannot hold it."""
    size = chunk_units(counts, dense.element_size()).sum(dtype=torch.int64) * UNIT
    return torch.where(size < MOST_BYTES, size + 4 * (counts.numel() + 1), -1)


def nbytes(dense: torch.Tensor) -> int | None:
    """Bytes that :func:`encode` would take; None if that is 32 GiB or more."""
    dense = encoding.matrix(dense)
    size = int(measure(dense, encoding.counted(chunk_counts(dense))))
    return None if size < 0 else size


def encode(dense: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors of a matrix (R, C) of float16, bfloat16 or float32 and any strides, where it
    lies, and ``largest``, the bytes of the largest chunk. On a GPU two kernels, and one
    synchronisation to learn the size.

    Raises TypeError or ValueError for what is no such matrix, UnsupportedError for chunks of 32 GiB
    or more in all.
    """
    dense = encoding.matrix(dense)
    if dense.device.type == "cuda":
        dense = readable(dense)
    counts = encoding.counted(chunk_counts(dense))
    units = chunk_units(counts, dense.element_size())
    ends = torch.zeros(units.numel() + 1, dtype=torch.int64, device=units.device)
    torch.cumsum(units, 0, dtype=torch.int64, out=ends[1:])
    largest = units.max() if units.numel() else units.sum()
    total, most = (UNIT * n for n in torch.stack((ends[-1], largest)).tolist())
    refuse_more(total, dense.shape)
    offsets = encoding.moved(ends.to(torch.int32), dense.device)
    if dense.device.type == "cpu":
        data = torch.zeros(total, dtype=torch.uint8, device=dense.device)
        cpu.fill(dense, offsets, data)
    else:
        data = torch.empty(total, dtype=torch.uint8, device=dense.device)
        _gpu().fill(dense, offsets, data)
    return {"data": data, "offsets": offsets}, {"largest": most}


def refuse_more(total: int, shape: tuple[int, int]) -> None:
    """Raises UnsupportedError for so many bytes."""
    if total >= MOST_BYTES:
        raise UnsupportedError(
            f"the bitmap format takes {total} bytes for a matrix of shape {tuple(shape)}; "
            "its offsets reach 32 GiB: compress slices of its rows"
        )


def measure_entries(entries: Entries) -> int | None:
    """:func:`nbytes` of a matrix by its entries."""
    chunks, total = chunks_of(entries.shape), 0
    if chunks * HEADER >= MOST_BYTES:
        return None
    for units in _units_of(entries):
        total += UNIT * int(units.sum(dtype=torch.int64))
    return total + 4 * (chunks + 1) if total < MOST_BYTES else None


def encode_entries(entries: Entries) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """:func:`encode` of a matrix by its entries."""
    chunks, total, most, at = chunks_of(entries.shape), 0, 0, 1
    refuse_more(chunks * HEADER, entries.shape)
    offsets = torch.zeros(chunks + 1, dtype=torch.int32, device=entries.device)
    for units in _units_of(entries):
        ends = total + units.cumsum(0, dtype=torch.int64)
        total, most = int(ends[-1]), max(most, int(units.max()))
        refuse_more(total * UNIT, entries.shape)
        offsets[at : at + units.numel()] = ends
        at += units.numel()
    data = torch.zeros(total * UNIT, dtype=torch.uint8, device=entries.device)
    for slab, first in _slabs_of(entries):
        cpu.fill_entries(slab, offsets[first:], ceil_div(entries.shape[1], COLUMNS), data)
    return {"data": data, "offsets": offsets}, {"largest": most * UNIT}


def _units_of(entries: Entries) -> Iterator[torch.Tensor]:
    """The 16-byte units of each chunk, some rows at a time."""
    across = ceil_div(entries.shape[1], COLUMNS)
    for slab, _ in _slabs_of(entries):
        chunks = ceil_div(slab.last - slab.first, ROWS) * across
        counts = torch.bincount(cpu.chunks_of_entries(slab, across), minlength=chunks)
        yield chunk_units(counts, entries.dtype.itemsize)


def _slabs_of(entries: Entries) -> Iterator[tuple[Slab, int]]:
    """The entries that are not 0, some rows at a time, with the number of the first chunk."""
    across = ceil_div(entries.shape[1], COLUMNS)
    for slab in entries.slabs(CELLS // across * ROWS) if across else ():
        yield slab.present(), slab.first // ROWS * across


def decode(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense matrix, contiguous, every bit as it was but the sign of -0.0; without a
    synchronisation."""
    data, offsets = (tensors[name] for name in TENSORS)
    if on_gpu(data.device):
        return _gpu().decode(data, offsets, tuple(shape), dtype)
    return cpu.decode(aligned(data), offsets, tuple(shape), dtype)


def aligned(data: torch.Tensor) -> torch.Tensor:
    """``data`` as it can be viewed as numbers of more bytes."""
    return data.clone() if data.storage_offset() % UNIT else data


def read_entries(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Iterator[Triplets]:
    """The entries that are not 0, some at a time."""
    data, offsets = (tensors[name] for name in TENSORS)
    data, across = aligned(data), ceil_div(shape[1], COLUMNS)
    for first in range(0, chunks_of(shape), SPREAD):
        starts = offsets[first : min(first + SPREAD, offsets.numel() - 1)].long()
        chunk, row, column, bits = cpu.read_entries(data, starts, dtype)
        chunk, mask = chunk + first, encoding.nonzero(bits)
        row, column = chunk // across * ROWS + row, chunk % across * COLUMNS + column
        yield Triplets(row[mask], column[mask], bits[mask])


def check(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Raises ValueError, naming what is wrong, unless tensors and facts are such as
    :func:`encode` makes for this shape and dtype. Synchronises."""
    fewest, most = HEADER // UNIT, (HEADER + POSITIONS * dtype.itemsize) // UNIT
    data, offsets, units = check_places(FORMAT, tensors, facts, shape, (fewest, most))
    _check_bits(data, offsets, units, dtype)
    check_edges(data, offsets, shape, _beyond)
    check_largest(facts, units)


def check_places(
    format: str,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    sizes: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``data``, ``offsets`` and the units of each chunk. Raises ValueError unless chunks lie one
    behind the other, of the fewest units to the most of ``sizes``. Synchronises."""
    encoding.check_tensors(format, tensors, {"data": torch.uint8, "offsets": torch.int32})
    encoding.check_facts(format, facts, ("largest",))
    data, offsets = (tensors[name] for name in TENSORS)
    encoding.check_size("offsets", offsets, (chunks_of(shape) + 1,))
    if data.dim() != 1:
        raise ValueError(f"data must have one dimension, got shape {tuple(data.shape)}")
    units, (fewest, most) = offsets.long().diff(), sizes
    wrong = ((units < fewest) | (units > most)).sum()
    first, end, wrong = torch.stack((offsets[0], offsets[-1], wrong)).tolist()
    if first != 0 or wrong:
        raise ValueError(
            f"offsets must begin with 0 and grow by {fewest} to {most} from chunk to chunk"
        )
    if data.numel() != UNIT * end:
        raise ValueError(f"data must have {UNIT * end} bytes, got {data.numel()}")
    return data, offsets, units


def check_largest(facts: Mapping[str, int], units: torch.Tensor) -> None:
    """Raises ValueError unless the fact is right. Synchronises."""
    largest = UNIT * int(units.max()) if units.numel() else 0
    if facts.get("largest") != largest:
        raise ValueError(
            f"the fact largest must be {largest}, the bytes of the largest chunk, "
            f"got {facts.get('largest')}"
        )


def _check_bits(
    data: torch.Tensor, offsets: torch.Tensor, units: torch.Tensor, dtype: torch.dtype
) -> None:
    """Raises ValueError unless chunks have a value for each bit, as kernels count their places by
    bits. Offsets have been checked."""
    wrong = chunk_units(marked(data, offsets[:-1]), dtype.itemsize) != units
    count = int(wrong.sum())
    if count:
        raise ValueError(
            "data must have, behind the bitmap of each chunk, as many values as it has bits set, "
            f"one for each bit: {count} of {len(units)} chunks are of another size"
        )


def check_edges(
    data: torch.Tensor,
    offsets: torch.Tensor,
    shape: tuple[int, int],
    beyond: Callable[[torch.Tensor, int, int], torch.Tensor],
) -> None:
    """Raises ValueError for bits beyond the matrix's edges, whose values a product would multiply
    with zeros: NaN stays. ``beyond`` says of bitmaps which have some beyond their first rows and
    columns. Offsets have been checked."""
    if 0 in shape:
        return
    slabs, across = ceil_div(shape[0], ROWS), ceil_div(shape[1], COLUMNS)
    last = shape[0] - (slabs - 1) * ROWS, shape[1] - (across - 1) * COLUMNS
    starts, lines, wrong = offsets[:-1].view(slabs, across), data.view(-1, UNIT), 0
    for edge, rows, cols in ((starts[-1], last[0], COLUMNS), (starts[:, -1], ROWS, last[1])):
        for some in edge.long().split(SPREAD) if (rows, cols) != (ROWS, COLUMNS) else ():
            wrong += int(beyond(lines[cpu.headers(some)], rows, cols).sum())
    if wrong:
        raise ValueError(
            f"data must have no bits set beyond the matrix's {shape[0]} rows and {shape[1]} "
            f"columns, {wrong} chunks at its edges have"
        )


def _beyond(words: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Which bitmaps have bits set beyond the first rows and columns."""
    return (cpu.positions(words) & ~cpu.inside(rows, cols, words.device)).any(1)


def marked(data: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Bits that are set in the bitmap of each chunk at ``starts``, int32, on any device."""
    lines, counts = data.view(-1, UNIT), []
    for some in starts.long().split(CHECKED):
        x = lines[cpu.headers(some)].view(torch.int32).flatten(1)
        x = x - (x >> 1 & 0x55555555)  # sums of 2 bits, of 4, of 8
        x = (x & 0x33333333) + (x >> 2 & 0x33333333)
        x = x + (x >> 4) & 0x0F0F0F0F
        counts.append(x.view(torch.uint8).sum(1, dtype=torch.int32))
    return torch.cat(counts) if counts else starts


def _gpu():
    """The module of kernels, which CPU tensors do not load."""
    from kernlib.families.sparse.formats import bitmap_gpu

    return bitmap_gpu
