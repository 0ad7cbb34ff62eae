"""The bitmap formats whose values have fewer bits: "bitmap-int8", "bitmap-fp8", "bitmap-int4".

Chunks and offsets are those of :mod:`kernlib.families.sparse.formats.bitmap`. A chunk of 16 rows x
256 columns has 128 little-endian words of 32 bits, its scales, its codes, and zeros up to whole 16
bytes. The order within is another than that of 16-bit values: one in which a lane finds eight
neighbouring columns side by side. Of row r of 16 and column c of a block b of 32 columns (8
blocks), with ``half = r // 8`` and ``g = r % 8``,

- the word is number ``(b // 2 * 8 + (g ^ b // 2)) * 4 + b % 2 * 2 + half``, and in it the bit
  ``c % 8 * 4 + c // 8``, 0 beyond the matrix's edges;
- scales are bfloat16, one for each row, or in int4 one for each row and 128 columns, number
  ``(g * groups + group) * 2 + half``;
- codes are in the order of ``(half, b, g, c)``, a byte each: ``q + 128`` of int8, q from -127 to
  127, or the bits of e4m3. Those of int4, q from -7 to 7 in two's complement, are nibbles: byte i
  has in its lower nibble number i of the upper eight rows and in its upper nibble number i of the
  lower eight. 0 where there is none.

An entry is whatever does not equal zero in the matrix that was compressed, and stays one where it
becomes 0. Its value is ``q * scale`` in float32, rounded once to the matrix's dtype: that is what
``decode`` gives. Products add up ``q * x`` in float32 and multiply the sums of a chunk's row, or of
128 columns of one, by the scale, so that they save that rounding. Scales are made by
:mod:`kernlib.families.sparse.formats.quantiser`.

8 bits take ``nnz + R C / 8 + R C / 1024 + R C / 128`` bytes and some 8 of padding a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kernlib.families.sparse.formats import bitmap, encoding, quantiser
from kernlib.families.sparse.formats import quantised_cpu as cpu
from kernlib.families.sparse.formats.bitmap_cpu import (
    COLUMNS,
    ROWS,
    UNIT,
    chunks_of,
    chunks_of_entries,
    headers,
)
from kernlib.families.sparse.formats.encoding import nonzero, readable
from kernlib.families.sparse.formats.entries import CELLS, Entries, Slab, Triplets
from kernlib.families.sparse.lowering.quantised import QUANTISED, ValueCode
from kernlib.lowering.arithmetic import ceil_div
from kernlib.runtime.rehearsal import on_gpu

SPREAD = 1 << 10  # chunks whose positions are looked at one by one


class QuantisedFormat:
    """One of the formats."""

    TENSORS = bitmap.TENSORS

    def __init__(self, code: ValueCode):
        self.code, self.FORMAT = code, code.format

    def nbytes(self, dense: torch.Tensor) -> int | None:
        """Bytes that :meth:`encode` would take; None if that is 32 GiB or more."""
        dense = encoding.matrix(dense)
        total = UNIT * int(self._units(dense).sum(dtype=torch.int64))
        return self._bytes(total, dense.shape)

    def encode(self, dense: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """The tensors of a matrix (R, C) of float16, bfloat16 or float32 and any strides, where it
        lies, and ``largest``, the bytes of the largest chunk. On a GPU a kernel packs what torch
        has made codes of, some rows at a time.

        Raises TypeError or ValueError for what is no such matrix or holds NaN or infinities,
        UnsupportedError for chunks of 32 GiB or more in all.
        """
        dense = readable(encoding.matrix(dense))
        refused = [
            quantiser.count_of_others(encoding.bits(some), dense.dtype)
            for some in dense.split(cpu.step(ceil_div(dense.shape[1], COLUMNS)))
        ]
        quantiser.refuse(sum(refused), self.code)
        offsets, data, facts = self._places([self._units(dense)], dense.shape, dense.device)
        fill = _gpu().fill if on_gpu(dense.device) else cpu.fill
        fill(dense, offsets, data, self.code)
        return {"data": data, "offsets": offsets}, facts

    def _units(self, dense: torch.Tensor) -> torch.Tensor:
        """The 16-byte units of each chunk."""
        counts = [cpu.counts_of(nonzero(encoding.bits(block))) for block, _ in cpu.blocks(dense)]
        empty = torch.zeros(0, 2, dtype=torch.int32, device=dense.device)
        return cpu.units_of(torch.cat([empty, *counts]), self.code)

    def _bytes(self, total: int, shape: tuple[int, int]) -> int | None:
        return total + 4 * (chunks_of(shape) + 1) if total < bitmap.MOST_BYTES else None

    def _places(
        self, units: list[torch.Tensor], shape: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, int]]:
        """The offsets of chunks of so many units, zeros where they are to be, and the facts."""
        units = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), *units])
        ends = units.cumsum(0, dtype=torch.int64)
        total, most = (UNIT * n for n in torch.stack((ends[-1], units.max())).tolist())
        bitmap.refuse_more(total, shape)
        data = torch.zeros(total, dtype=torch.uint8, device=device)
        return ends.to(torch.int32), data, {"largest": most}

    def measure_entries(self, entries: Entries) -> int | None:
        """:meth:`nbytes` of a matrix by its entries."""
        if chunks_of(entries.shape) * self.code.offset >= bitmap.MOST_BYTES:
            return None
        total = sum(UNIT * int(u.sum(dtype=torch.int64)) for u in self._units_of(entries))
        return self._bytes(total, entries.shape)

    def encode_entries(self, entries: Entries) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """:meth:`encode` of a matrix by its entries."""
        bitmap.refuse_more(chunks_of(entries.shape) * self.code.offset, entries.shape)
        slabs = [slab for slab, _, _ in _slabs_of(entries)]
        refused = sum(quantiser.count_of_others(slab.bits, entries.dtype) for slab in slabs)
        quantiser.refuse(refused, self.code)
        units = [*self._units_of(entries)]
        offsets, data, facts = self._places(units, entries.shape, entries.device)
        for slab, first, chunks in _slabs_of(entries):
            self._fill(slab, entries, offsets[first : first + chunks].long(), data)
        return {"data": data, "offsets": offsets}, facts

    def _units_of(self, entries: Entries) -> Iterator[torch.Tensor]:
        """The 16-byte units of each chunk, some rows at a time."""
        across = ceil_div(entries.shape[1], COLUMNS)
        for slab, _, chunks in _slabs_of(entries):
            yield cpu.units_of(_counts(slab, across, chunks), self.code)

    def _fill(self, slab: Slab, entries: Entries, starts: torch.Tensor, data: torch.Tensor) -> None:
        """Write the chunks of some rows, at ``starts``, by their entries, all other than 0."""
        code, chunks = self.code, len(starts)
        chunk = chunks_of_entries(slab, ceil_div(entries.shape[1], COLUMNS))
        column, half, g = slab.columns % COLUMNS, slab.rows % ROWS // 8, slab.rows % 8
        block, c = column // 32, column % 32
        values = slab.bits.view(entries.dtype).float()
        group = ((chunk * 8 + g) * code.groups + column // code.columns) * 2 + half
        most = values.new_zeros(chunks * 16 * code.groups)
        most.scatter_reduce_(0, group, values.abs(), "amax")
        scales = quantiser.scales_of(most, code, entries.dtype)
        codes = quantiser.codes_of(values, scales[group], code)
        word = (block // 2 * 8 + (g ^ block // 2)) * 4 + block % 2 * 2 + half
        bit = c % 8 * 4 + c // 8
        place = starts[chunk] * UNIT + word * 4 + bit // 8
        data.index_add_(0, place, (1 << bit % 8).to(torch.uint8))
        cpu.put_scales(data, starts, scales)
        order = ((((chunk * 2 + half) * 8 + block) * 8 + g) * 32 + c).argsort()
        counts = _counts(slab, ceil_div(entries.shape[1], COLUMNS), chunks)
        cpu.put_codes(data, starts, counts, codes[order], code)

    def decode(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The dense matrix, contiguous; on a GPU without a synchronisation."""
        data, offsets = (tensors[name] for name in self.TENSORS)
        if on_gpu(data.device):
            return _gpu().decode(data, offsets, tuple(shape), dtype, self.code)
        return cpu.decode(bitmap.aligned(data), offsets, tuple(shape), dtype, self.code)

    def read_entries(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Iterator[Triplets]:
        """The entries, some at a time, those that have become 0 too."""
        data, offsets = (tensors[name] for name in self.TENSORS)
        data, across = bitmap.aligned(data), ceil_div(shape[1], COLUMNS)
        for first in range(0, chunks_of(shape), SPREAD):
            starts = offsets[first : min(first + SPREAD, offsets.numel() - 1)].long()
            present, values = cpu.chunks_at(data, starts, self.code, dtype)
            chunk, half, block, g, c = present.nonzero(as_tuple=True)
            row = (first + chunk) // across * ROWS + half * 8 + g
            column = (first + chunk) % across * COLUMNS + block * 32 + c
            yield Triplets(row, column, encoding.bits(values))

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """How many entries there are, those that have become 0 too."""
        data, offsets = (tensors[name] for name in self.TENSORS)
        return int(bitmap.marked(bitmap.aligned(data), offsets[:-1]).sum(dtype=torch.int64))

    def check(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Raises ValueError, naming what is wrong, unless tensors and facts are such as
        :meth:`encode` makes for this shape and dtype. Synchronises."""
        fewest, most = self.code.offset // UNIT, (self.code.offset + self.code.most) // UNIT
        data, offsets, units = bitmap.check_places(
            self.FORMAT, tensors, facts, shape, (fewest, most)
        )
        self._check_chunks(bitmap.aligned(data), offsets, units)
        bitmap.check_edges(data, offsets, shape, self._beyond)
        bitmap.check_largest(facts, units)

    def _check_chunks(self, data: torch.Tensor, offsets: torch.Tensor, units: torch.Tensor) -> None:
        """Raises ValueError unless chunks have a code for each bit, as kernels count their places
        by bits, none that no value has, and scales that are numbers. Offsets have been checked."""
        wrong = infinite = nameless = 0
        lines = data.view(-1, UNIT)
        for starts, stored in zip(offsets[:-1].split(SPREAD), units.split(SPREAD), strict=True):
            starts = starts.long()
            counts = cpu.counts_of(cpu.positions(lines[headers(starts)]))
            misplaced = int((cpu.units_of(counts, self.code) != stored).sum())
            wrong += misplaced
            if not misplaced:
                codes = cpu.codes_at(data, starts, counts, self.code)
                nameless += int((codes & self.code.mask == self.code.unused).sum())
            scales = cpu.scales_at(data, starts, self.code)
            infinite += int((~((scales > 0) & scales.isfinite())).sum())
        if wrong:
            raise ValueError(
                "data must have, behind the bitmap and the scales of each chunk, as many codes as "
                f"it has bits set, one for each bit: {wrong} of {len(units)} chunks are of another "
                "size"
            )
        if nameless:
            raise ValueError(
                f"data must have codes that stand for values, {nameless} are the one of "
                f"{self.code.values} that stands for none"
            )
        if infinite:
            raise ValueError(
                f"data must have scales that are finite and above 0, {infinite} are others"
            )

    @staticmethod
    def _beyond(words: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
        """Which bitmaps have bits set beyond the first rows and columns."""
        beyond = ~cpu.inside(rows, cols, words.device)
        return (cpu.positions(words) & beyond).flatten(1).any(1)


# Whole slabs, as they are.


FORMATS = {name: QuantisedFormat(code) for name, code in QUANTISED.items()}


def _slabs_of(entries: Entries) -> Iterator[tuple[Slab, int, int]]:
    """The entries that are not 0, some rows at a time, with the number of the first chunk and how
    many chunks there are."""
    across = ceil_div(entries.shape[1], COLUMNS)
    for slab in entries.slabs(CELLS // across * ROWS) if across else ():
        yield slab.present(), slab.first // ROWS * across, _chunks(slab, across)


def _chunks(slab: Slab, across: int) -> int:
    return ceil_div(slab.last - slab.first, ROWS) * across


def _counts(slab: Slab, across: int, chunks: int) -> torch.Tensor:
    """Entries of each half of the chunks of some rows, (chunks, 2)."""
    halves = chunks_of_entries(slab, across) * 2 + slab.rows % ROWS // 8
    return torch.bincount(halves, minlength=2 * chunks).view(chunks, 2)


def _gpu():
    """The module of kernels, which CPU tensors do not load."""
    from kernlib.families.sparse.formats import quantised_gpu

    return quantised_gpu
