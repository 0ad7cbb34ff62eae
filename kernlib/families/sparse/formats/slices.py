"""The formats u8, u4 and u2: a value and a step of 8, 4 or 2 bits to its column for each entry.

u8 is for densities up to about .1, where steps are long, u4 for those from there to about .4, u2
for those from there to about .85.

Columns go in panels of ``width``. The rows of a panel, sorted by how many codes they have there,
most first, are taken 32 at a time: a slice, of which each lane holds one row and as many codes as
the longest row needs. All slices of a panel, in an order in which each run of them is about as long
as any other, then those of the next panel. Where one panel has all columns, the codes of its lanes
are cut into ``parts`` of as many codes each, which different warps take. Tensors:

=========  =====  =====================================================================
data       uint8  the slices' codes, one slice after the other, and of each its parts
offsets    int32  [slices + 1] codes of a lane before each slice
rows       uint8  [panels, slices of a panel, 64] row of each lane in two bytes, the low one
                  first, 65535 for none; of more than 65535 rows int32 [..., 32], -1 for none.
                  With parts (1 + parts) times as many: behind the rows, of each part the column
                  of each lane's code before its first one, of u2 the next column; 0 of the first
=========  =====  =====================================================================

A code is a value and the step to its column: from that of the code before, the first one's from the
panel's first column. Longer steps are divided by codes of a zero value and the longest step. Codes
behind a row's last are zero in value and step. Stored is whatever does not equal zero, NaN
included; -0.0 comes back as 0.0. A slice's length is that of its longest row, of u4 the next even
one, of u2 the next multiple of 4, with parts that of each. The first ``length // 8 * 8`` codes of
its lanes lie in groups of 8, the rest in one of 4, of 2 and of 1 as the bits of the length say. A
group is the values of its codes, lane by lane, then their steps, lane by lane: each is one load of
a lane. Of u4, the steps of a group's first half are the low bits of a lane's bytes, those of the
second half the high bits.

Of u2, groups are of 16 codes, the rest of 8 and of 4: the values of 8, lane by lane, those of the
other 8, then the steps of each quarter of the codes in two bits of a lane's bytes. Two bits hold a
step of 1 to 4, less one; the first is that from the column before the panel. As none is 0, codes
that fill up a row go ahead too, and must not leave the panel. So they come first: those of a row
that lacks E codes are of step 1 until it lacks none, and the entry in column c, the n-th code of
its row were it not for that, is number ``min(c, n + E)``. Such a row ends in its last entry, or in
column ``length - 1``.

That is itemsize + 1, + .5 or + .25 bytes a code, 2 a row and panel or part. Of a matrix of uniform
density d, what fills up slices is under 1 % of the codes, half a code a lane, one, or two, of 50 to
1400; long steps of u4 add ``1 / (1 - (1 - d)^15) - 1``: 26 % at .1, 3.6 % at .2, .5 % at .3; those
of u2 ``1 / (1 - (1 - d)^4) - 1``: 15 % at .4, 6.7 % at .5, 2.6 % at .6, .8 % at .7.

Steps are the deltas of MACKO-SpMV, in the order in which threads read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch

from kernlib.families.sparse.formats.encoding import (
    check_facts,
    check_size,
    check_tensors,
    matrix,
)
from kernlib.families.sparse.formats.entries import CELLS, Entries, Triplets
from kernlib.families.sparse.formats.tiling import Tiling, best_tiling, panel_width, tiling_of
from kernlib.families.sparse.lowering.codes import (
    LANES,
    MOST_SIZE,
    SHORT_ROWS,
    U2,
    U4,
    U8,
    Code,
    grid,
)
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.runtime.rehearsal import on_gpu

MOST_CODES = 2**31 - 1  # of a lane in all slices, as offsets count them


class SlicesFormat(NamedTuple):
    """A format of :mod:`kernlib.families.sparse.formats.registry`, by the code of its steps."""

    code: Code
    TENSORS = ("data", "offsets", "rows")

    @property
    def FORMAT(self) -> str:
        """Its name."""
        return self.code.name

    def encode(
        self, dense: torch.Tensor, tiling: Tiling | None = None, columns: int = 1
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Tensors and facts of a (rows, columns) matrix of float16, bfloat16 or float32, of any
        strides.

        The tiling is by default :func:`best_tiling`'s for products with ``columns`` vectors. On
        CUDA kernels count and write codes, and the host arranges rows in between. Raises as
        :func:`kernlib.families.sparse.formats.encoding.matrix`, and ValueError for a matrix that
        offsets cannot count.
        """
        dense = matrix(dense)
        self._refuse_larger(dense.shape)
        tiling, starts, rows = self._tiled(dense, columns, tiling)
        total = int(starts[-1])
        self._refuse_more(total)
        size = total * self.code.size(dense.element_size())
        data, offsets, stored_rows = self._room(size, tiling.facts, dense.shape, dense.device)
        offsets.copy_(starts.to(torch.int32), non_blocking=True)
        stored_rows.copy_(rows, non_blocking=True)
        if size:
            _codec(dense).write(self.code, dense, tiling, offsets, stored_rows, data)
        return {"data": data, "offsets": offsets, "rows": stored_rows}, tiling.facts

    def _tiled(
        self,
        dense: torch.Tensor,
        columns: int = 1,
        tiling: Tiling | None = None,
        counts: Mapping[int, torch.Tensor] | None = None,
    ) -> tuple[Tiling, torch.Tensor, torch.Tensor]:
        """A tiling, by default the best one, and its :func:`arrange`. ``counts`` are the codes of
        each (panel, row), by widths of panels, as far as they have been counted."""

        lengths, shape, itemsize = dict(counts or {}), tuple(dense.shape), dense.element_size()
        codec = _codec(dense)

        def codes(tiling: Tiling) -> torch.Tensor:
            width = tiling.width
            if width not in lengths:
                lengths[width] = codec.count(self.code, dense, width)
            return lengths[width]

        if not lengths and _is_on_host(dense):  # all that may be asked for in one pass
            both = (tiling_of(shape, itemsize, columns).width, panel_width(*shape, itemsize))
            widths = both if tiling is None else (tiling.width,)
            lengths = _cpu().counts(self.code, dense, widths)

        def total(tiling: Tiling) -> int:
            return int(codes(tiling).sum())

        tiling = tiling or best_tiling(shape, itemsize, columns, total)
        return tiling, *arrange(codes(tiling), self.code.unit, tiling.parts)

    def _tiling_of(self, entries: Entries, columns: int = 1) -> Tiling:
        """The best tiling of a matrix by its entries."""

        def total(tiling: Tiling) -> int:
            width, rows = tiling.width, entries.shape[0]
            some = _some_panels(grid(entries.shape, width)[0], rows)
            counts = (_cpu().count_entries(self.code, entries, width, panels) for panels in some)
            return sum(int(count.sum()) for count in counts)

        return best_tiling(entries.shape, entries.dtype.itemsize, columns, total)

    def _room(
        self, size: int, facts: Mapping[str, int], shape: tuple[int, int], device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Tensors of a matrix with ``size`` bytes of data, zero, in one tensor."""
        end = size + sum(length for length, _ in _pieces(facts, shape))
        return self.split(torch.zeros(end, dtype=torch.uint8, device=device), facts, shape)

    def split(
        self, joined: torch.Tensor, facts: Mapping[str, int], shape: tuple[int, int]
    ) -> tuple[torch.Tensor, ...]:
        """The tensors, in order, of a matrix that lie in one of bytes: offsets, rows and data, each
        from whole 16 bytes on. Raises ValueError for one that has no room for them, and for facts
        that are none of the format."""
        Tiling.of(facts).check(shape[1], 1)
        if joined.dtype != torch.uint8 or joined.dim() != 1:
            kind = f"{joined.dtype} of shape {tuple(joined.shape)}"
            raise ValueError(f"the tensors of a matrix lie in one (n,) of uint8, got {kind}")
        views, begin = [], 0
        for length, (dtype, sizes) in _pieces(facts, shape):
            end = begin + math.prod(sizes) * dtype.itemsize
            if begin + length > joined.numel():
                raise ValueError(
                    f"a matrix of shape {tuple(shape)} in format {self.code.name} takes more than "
                    f"{joined.numel()} bytes"
                )
            views.append(joined[begin:end].view(dtype).view(sizes))
            begin += length
        return (joined[begin:], *views)

    def joined(
        self, operands: Sequence[torch.Tensor], facts: Mapping[str, int], shape: tuple[int, int]
    ) -> torch.Tensor | None:
        """The tensor that :meth:`split` would split into these; None if they do not lie so. No
        view: autograd of compiled code drops attributes of views."""
        data, offsets, rows = operands
        (behind, _), (rest, _) = _pieces(facts, shape)
        begin = data.storage_offset() - behind - rest
        places = offsets.storage_offset() * 4, rows.storage_offset() * rows.element_size()
        storage = data.untyped_storage().data_ptr()
        if begin < 0 or places != (begin, begin + behind) or not data.is_contiguous():
            return None
        if any(t.untyped_storage().data_ptr() != storage for t in (offsets, rows)):
            return None
        return data.as_strided((behind + rest + data.numel(),), (1,), begin).detach()

    def together(
        self, operands: Sequence[torch.Tensor], facts: Mapping[str, int], shape: tuple[int, int]
    ) -> tuple[torch.Tensor, ...]:
        """The tensors, copied into one unless they lie in one."""
        if self.joined(operands, facts, shape) is not None:
            return tuple(operands)
        room = self._room(operands[0].numel(), facts, shape, operands[0].device)
        for to, t in zip(room, operands, strict=True):
            to.copy_(t)
        return room

    def measure_entries(self, entries: Entries) -> int | None:
        """:meth:`nbytes` of a matrix by its entries."""
        if max(entries.shape) > MOST_SIZE:
            return None
        tiling = self._tiling_of(entries)
        panels, slices = grid(entries.shape, tiling.width)
        if entries.is_wide(panels, tiling.width):
            entries = entries.in_panels(tiling.width)[0]
        total = sum(int(starts[-1]) for _, starts, _ in self._arranged(entries, tiling))
        if total > MOST_CODES:
            return None
        kind, number = _row_type(entries.shape[0], tiling.parts)
        overhead = panels * slices * number * kind.itemsize + 4 * (panels * slices + 1)
        return total * self.code.size(entries.dtype.itemsize) + overhead

    def encode_entries(
        self, entries: Entries, columns: int = 1
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """:meth:`encode` of a matrix by its entries. With fewer entries than panels, only the
        panels that hold some are computed."""
        self._refuse_larger(entries.shape)
        tiling = self._tiling_of(entries, columns)
        panels = grid(entries.shape, tiling.width)[0]
        if not entries.is_wide(panels, tiling.width):
            return self._encoded(entries, tiling), tiling.facts
        some, numbers = entries.in_panels(tiling.width)
        tensors = self._encoded(some, tiling)
        rows, slices = tensors["rows"], tensors["rows"].shape[1]
        empty = torch.zeros(1, entries.shape[0], dtype=torch.int32, device=entries.device)
        all_rows = arrange(empty, parts=tiling.parts)[1].expand(panels, *rows.shape[1:]).clone()
        all_rows[numbers] = rows
        lengths = torch.zeros(panels, slices, dtype=torch.int32, device=entries.device)
        lengths[numbers] = tensors["offsets"].diff().view(len(numbers), slices)
        offsets = lengths.view(-1).cumsum(0, dtype=torch.int32)
        offsets = torch.nn.functional.pad(offsets, (1, 0))
        return {"data": tensors["data"], "offsets": offsets, "rows": all_rows}, tiling.facts

    def _encoded(self, entries: Entries, tiling: Tiling) -> dict[str, torch.Tensor]:
        """The tensors of a matrix whose panels are all looked at."""
        place = entries.device
        panels, slices = grid(entries.shape, tiling.width)
        kind, number = _row_type(entries.shape[0], tiling.parts)
        rows = torch.empty((panels, slices, number), dtype=kind, device=place)
        offsets, total = torch.zeros(panels * slices + 1, dtype=torch.int32, device=place), 0
        for some, starts, arranged in self._arranged(entries, tiling):
            rows[some], starts = arranged, starts + total
            total = int(starts[-1])
            self._refuse_more(total)
            offsets[some.start * slices : some.stop * slices + 1] = starts
        size = total * self.code.size(entries.dtype.itemsize)
        data = torch.zeros(size, dtype=torch.uint8, device=place)
        for some in _some_panels(panels, entries.shape[0]) if size else ():
            _cpu().write_entries(self.code, entries, tiling, some, offsets, rows, data)
        return {"data": data, "offsets": offsets, "rows": rows}

    def _arranged(self, entries: Entries, tiling: Tiling) -> Iterator[tuple]:
        """Ranges of panels with their :func:`arrange`, some panels at a time."""
        for some in _some_panels(grid(entries.shape, tiling.width)[0], entries.shape[0]):
            lengths = _cpu().count_entries(self.code, entries, tiling.width, some)
            yield some, *arrange(lengths, self.code.unit, tiling.parts)

    def _refuse_larger(self, shape: tuple[int, int]) -> None:
        if max(shape) > MOST_SIZE:
            raise ValueError(
                f"format {self.code.name} holds {MOST_SIZE} rows or columns at most, got shape "
                f"{tuple(shape)}"
            )

    def _refuse_more(self, total: int) -> None:
        if total > MOST_CODES:
            raise ValueError(
                f"format {self.code.name} holds {MOST_CODES} codes a lane, the matrix needs {total}"
            )

    def decode(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The dense matrix, contiguous, every bit as it was but the sign of -0.0; without a
        synchronisation."""
        dense = torch.empty(shape, dtype=dtype, device=tensors["data"].device)
        self.decode_to(dense, tensors, facts)
        return dense

    def decode_to(
        self, dense: torch.Tensor, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, int]
    ) -> None:
        """Write the matrix into ``dense``, contiguous, of its shape and dtype."""
        if dense.numel() and tensors["data"].numel():
            _codec(dense).read(self.code, tensors, Tiling.of(facts), dense)
        else:
            dense.zero_()

    def read_entries(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Iterator[Triplets]:
        """The entries that are not 0, some at a time."""
        return _cpu().read_entries(self.code, tensors, Tiling.of(facts), shape[1], dtype)

    def nbytes(self, dense: torch.Tensor) -> int | None:
        """The bytes that :meth:`encode` would take; None for a matrix that it refuses. The host
        waits for them."""
        size = self.measure(dense)
        return None if size < 0 else size

    def measure(self, dense: torch.Tensor, counts: Mapping[int, torch.Tensor] | None = None) -> int:
        """:meth:`nbytes`, with -1 for None. ``counts`` may hold the codes of each (panel, row), by
        widths of panels."""
        dense = matrix(dense)
        if max(dense.shape) > MOST_SIZE:
            return -1
        _, starts, rows = self._tiled(dense, counts=counts)
        overhead = rows.numel() * rows.element_size() + 4 * starts.numel()
        total = int(starts[-1])
        return -1 if total > MOST_CODES else total * self.code.size(dense.element_size()) + overhead

    def check(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Raises ValueError, naming what is wrong, unless tensors and facts are of this format and
        shape. Reads all of them, and waits for the device."""
        if max(shape) > MOST_SIZE:
            raise ValueError(f"shape must be of sizes up to {MOST_SIZE}, got {tuple(shape)}")
        tiling = Tiling.of(facts)
        kind, number = _row_type(shape[0], tiling.parts)
        check_tensors(
            self.code.name, tensors, {"data": torch.uint8, "offsets": torch.int32, "rows": kind}
        )
        check_facts(self.code.name, facts, ("width", "parts"))
        tiling.check(shape[1], dtype.itemsize)
        panels, slices = grid(shape, tiling.width)
        check_size("offsets", tensors["offsets"], (panels * slices + 1,))
        check_size("rows", tensors["rows"], (panels, slices, number))
        _check_sizes(self.code, tensors, tiling.parts, shape, dtype)
        if panels:
            _check_columns(self.code, tensors, tiling, shape, dtype)


FORMATS = {code.name: SlicesFormat(code) for code in (U8, U4, U2)}


def _pieces(
    facts: Mapping[str, int], shape: tuple[int, int]
) -> list[tuple[int, tuple[torch.dtype, tuple[int, ...]]]]:
    """The bytes up to whole 16, dtype and sizes of offsets and rows."""
    tiling = Tiling.of(facts)
    panels, slices = grid(shape, tiling.width)
    kind, number = _row_type(shape[0], tiling.parts)
    kinds = (torch.int32, (panels * slices + 1,)), (kind, (panels, slices, number))
    return [(round_up(math.prod(n) * dtype.itemsize, 16), (dtype, n)) for dtype, n in kinds]


def _check_sizes(
    code: Code, tensors: Mapping[str, torch.Tensor], parts: int, shape: tuple, dtype: torch.dtype
) -> None:
    """Check that slices lie in data one behind the other, and that panels have each row once."""
    offsets, rows, data = tensors["offsets"].long(), tensors["rows"], tensors["data"]
    unit = code.unit * parts
    wrong = ((offsets.diff() < 0) | (offsets[1:] % unit != 0)).sum()
    ends = torch.stack([offsets[0], offsets[-1], wrong]).tolist()
    size = ends[1] * code.size(dtype.itemsize)
    if ends[0] != 0 or ends[2] or tuple(data.shape) != (size,):
        raise ValueError(
            f"offsets must rise from 0, by multiples of {unit}, to the codes of a lane in "
            f"data, which are {size} bytes by its last entry; data has shape {tuple(data.shape)}"
        )
    numbers = _cpu().numbers(rows).flatten(1)
    ordered = torch.where(numbers == -1, shape[0], numbers).sort().values  # -1 sorts last
    indices = torch.arange(ordered.shape[1], dtype=torch.int64, device=rows.device)
    if bool((ordered != indices.clamp_max(shape[0])).any() | (numbers >= shape[0]).any()):
        raise ValueError(
            f"rows must be those of the matrix, 0 to {shape[0] - 1}, once in each panel, and else "
            "-1, of two bytes 65535"
        )


def _check_columns(
    code: Code,
    tensors: Mapping[str, torch.Tensor],
    tiling: Tiling,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Check that steps lead to columns of a panel, as kernels read x there; what fills up rows of
    u2 may go on to a whole unit of each part, where nothing is read for it. And that parts begin
    where steps lead."""
    (width, parts), (panels, slices) = tiling, grid(shape, tiling.width)
    steps = _cpu().steps_of_parts(code, parts, dtype.itemsize, tensors["offsets"], tensors["data"])
    if parts > 1 and not torch.equal(_cpu().starts(tensors["rows"])[0], steps.cumsum(1) - steps):
        raise ValueError(
            "rows must say, behind the rows, where the steps in data lead before each part"
        )
    columns = steps.sum(1) - code.least  # of each lane's last code
    last = shape[1] - (panels - 1) * width
    most = round_up(last, code.unit) + (parts - 1) * code.unit if code.least else last
    full = slices * (panels - 1)
    if bool((columns[:full] >= width).any() | (columns[full:] >= most).any()):
        raise ValueError(
            f"data must have steps to {width} columns of a panel, {last} of the last one, not "
            "beyond them"
        )


def arrange(
    lengths: torch.Tensor, unit: int = 1, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the codes of each (panel, row): int64 starts of all slices and their end, and rows with
    room behind them for the starts of parts. On the host, which waits for the codes: by numpy, as
    each of torch's operators may wake threads for these few numbers."""
    codes = lengths.cpu().numpy()
    panels, count = codes.shape
    slices = ceil_div(count, LANES)
    padded = np.full((panels, slices * LANES), -1, codes.dtype)
    padded[:, :count] = codes
    keys = -padded  # of 16 bits they are sorted by radix
    if codes.size and codes.max() < 1 << 15:
        keys = keys.astype(np.int16)
    rows = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(padded, rows, 1)
    rows = np.where(ordered < 0, -1, rows).reshape(panels, slices, LANES)
    order = slice_order(slices)
    longest = ordered[:, ::LANES][:, order].clip(0).reshape(-1).astype(np.int64)
    unit *= parts
    starts = np.zeros(len(longest) + 1, np.int64)
    np.cumsum((longest + unit - 1) // unit * unit, out=starts[1:])
    kind, number = _row_type(count, parts)
    room = np.zeros((panels, slices, number * kind.itemsize), np.uint8)
    view = room.view(np.uint16 if kind == torch.uint8 else np.int32)
    view[:, :, :LANES] = rows[:, order]
    return torch.from_numpy(starts), torch.from_numpy(room).view(kind)


def _some_panels(panels: int, rows: int) -> Iterator[slice]:
    """All panels, as many at a time as are counted together."""
    step = max(1, CELLS // max(LANES, rows))  # lanes of a slice are counted, be they of rows or not
    for first in range(0, panels, step):
        yield slice(first, min(panels, first + step))


def slice_order(slices: int) -> np.ndarray:
    """The sorted slice at each place: by reversed bits (van der Corput), so that the slices of any
    run are as long as others are."""
    index = np.arange(slices)
    turned = np.zeros_like(index)
    for bit in range(max(slices - 1, 0).bit_length()):
        turned = turned * 2 + (index >> bit & 1)
    return np.argsort(turned)


def _row_type(rows: int, parts: int = 1) -> tuple[torch.dtype, int]:
    """The dtype of stored rows, and their elements for a slice. Bytes, not int16: no collective
    takes that, and so no ``DistributedDataParallel`` a module that holds it."""
    lanes = LANES if parts == 1 else (1 + parts) * LANES
    return (torch.uint8, 2 * lanes) if rows <= SHORT_ROWS else (torch.int32, lanes)


def _codec(dense: torch.Tensor) -> ModuleType:
    """The module that counts, writes and reads codes where a matrix lies."""
    if _is_on_host(dense):
        return _cpu()
    from kernlib.families.sparse.formats import slices_gpu as gpu

    return gpu


def _is_on_host(dense: torch.Tensor) -> bool:
    return not dense.is_cuda and not (dense.is_meta and on_gpu(dense.device))


def _cpu() -> ModuleType:
    """The module for matrices on the host, which those on a GPU do not load."""
    from kernlib.families.sparse.formats import slices_cpu as cpu

    return cpu
