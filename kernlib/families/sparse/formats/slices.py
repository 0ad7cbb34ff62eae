"""The formats u8, u4 and u2: a value and a step of 8, 4 or 2 bits to its column for each entry.

u8 is for densities up to about .1, where steps are long, u4 for those from there to about .4, u2
for those from there to about .85.

Columns go in panels of ``width``. The rows of a panel, sorted by how many codes they have there,
most first, are taken 32 at a time: a slice, of which each lane holds one row and as many codes as
the longest row needs. All slices of a panel, in an order in which each run of them is about as long
as any other, then those of the next panel. Tensors:

=========  =====  =====================================================================
data       uint8  the slices' codes, one slice after the other
offsets    int32  [slices + 1] codes of a lane before each slice
rows       uint8  [panels, slices of a panel, 64] row of each lane in two bytes, the low one
                  first, 65535 for none; of more than 65535 rows int32 [..., 32], -1 for none
=========  =====  =====================================================================

A code is a value and the step to its column: from that of the code before, the first one's from the
panel's first column. Longer steps are divided by codes of a zero value and the longest step. Codes
behind a row's last are zero in value and step. Stored is whatever does not equal zero, NaN
included; -0.0 comes back as 0.0. A slice's length is that of its longest row, of u4 the next even
one, of u2 the next multiple of 4. The first ``length // 8 * 8`` codes of its lanes lie in groups of
8, the rest in one of 4, of 2 and of 1 as the bits of the length say. A group is the values of its
codes, lane by lane, then their steps, lane by lane: each is one load of a lane. Of u4, the steps of
a group's first half are the low bits of a lane's bytes, those of the second half the high bits.

Of u2, groups are of 16 codes, the rest of 8 and of 4: the values of 8, lane by lane, those of the
other 8, then the steps of each quarter of the codes in two bits of a lane's bytes. Two bits hold a
step of 1 to 4, less one; the first is that from the column before the panel. As none is 0, codes
that fill up a row go ahead too, and must not leave the panel. So they come first: those of a row
that lacks E codes are of step 1 until it lacks none, and the entry in column c, the n-th code of
its row were it not for that, is number ``min(c, n + E)``. Such a row ends in its last entry, or in
column ``length - 1``.

That is itemsize + 1, + .5 or + .25 bytes a code, 2 a row and panel. Of a matrix of uniform density
d, what fills up slices is under 1 % of the codes, half a code a lane, one, or two, of 50 to 1400;
long steps of u4 add ``1 / (1 - (1 - d)^15) - 1``: 26 % at .1, 3.6 % at .2, .5 % at .3; those of u2
``1 / (1 - (1 - d)^4) - 1``: 15 % at .4, 6.7 % at .5, 2.6 % at .6, .8 % at .7.

Steps are the deltas of MACKO-SpMV, in the order in which threads read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import NamedTuple

import torch

from kernlib.families.sparse.formats import slices_cpu as cpu
from kernlib.families.sparse.formats.encoding import (
    check_facts,
    check_size,
    check_tensors,
    matrix,
    moved,
)
from kernlib.families.sparse.formats.entries import CELLS, Entries, Triplets
from kernlib.families.sparse.lowering.codes import (
    LANES,
    MOST_SIZE,
    SHORT_ROWS,
    U2,
    U4,
    U8,
    WIDEST,
    Code,
    grid,
)
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.runtime.rehearsal import on_gpu

# Default widths, of 2-byte values: 8 copies of 8 vectors' x fill Hopper's shared memory at 1792.
LEAST_WIDTH, MOST_WIDTH = 512, 1792
WAVE = 132 * 32  # slices that an H200 takes at a time, one a warp
SLICE_COST = 64  # columns that one takes as long as, without codes
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
        self, dense: torch.Tensor, width: int | None = None
    ) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Tensors and facts of a (rows, columns) matrix of float16, bfloat16 or float32, of any
        strides.

        ``width`` of a panel is a multiple of 16 columns; by default :func:`panel_width`'s. On CUDA
        all is done by kernels, and the host waits once, for the size. Raises as
        :func:`kernlib.families.sparse.formats.encoding.matrix`, and ValueError for a matrix that
        offsets cannot count.
        """
        dense = matrix(dense)
        self._refuse_larger(dense.shape)
        width = width or panel_width(*dense.shape, dense.element_size())
        starts, rows = arrange(_codec(dense).count(self.code, dense, width), self.code.unit)
        total = int(starts[-1])
        self._refuse_more(total)
        size = total * self.code.size(dense.element_size())
        data = torch.zeros(size, dtype=torch.uint8, device=dense.device)
        offsets, rows = (moved(t, dense.device) for t in (starts.to(torch.int32), rows))
        if size:
            _codec(dense).write(self.code, dense, width, offsets, rows, data)
        return {"data": data, "offsets": offsets, "rows": rows}, {"width": width}

    def measure_entries(self, entries: Entries) -> int | None:
        """:meth:`nbytes` of a matrix by its entries."""
        if max(entries.shape) > MOST_SIZE:
            return None
        width = panel_width(*entries.shape, entries.dtype.itemsize)
        panels, slices = grid(entries.shape, width)
        if entries.is_wide(panels, width):
            entries = entries.in_panels(width)[0]
        total = sum(int(starts[-1]) for _, starts, _ in self._arranged(entries, width))
        if total > MOST_CODES:
            return None
        kind, number = _row_type(entries.shape[0])
        held = panels * slices * number * kind.itemsize + 4 * (panels * slices + 1)
        return total * self.code.size(entries.dtype.itemsize) + held

    def encode_entries(self, entries: Entries) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """:meth:`encode` of a matrix by its entries. Of one with fewer of these than panels, those
        panels are looked at that hold some."""
        self._refuse_larger(entries.shape)
        width = panel_width(*entries.shape, entries.dtype.itemsize)
        panels = grid(entries.shape, width)[0]
        if not entries.is_wide(panels, width):
            return self._encoded(entries, width), {"width": width}
        some, numbers = entries.in_panels(width)
        tensors = self._encoded(some, width)
        rows, slices = tensors["rows"], tensors["rows"].shape[1]
        empty = torch.zeros(1, entries.shape[0], dtype=torch.int32, device=entries.device)
        every = arrange(empty)[1].expand(panels, *rows.shape[1:]).clone()
        every[numbers] = rows
        lengths = torch.zeros(panels, slices, dtype=torch.int32, device=entries.device)
        lengths[numbers] = tensors["offsets"].diff().view(len(numbers), slices)
        offsets = lengths.view(-1).cumsum(0, dtype=torch.int32)
        offsets = torch.nn.functional.pad(offsets, (1, 0))
        return {"data": tensors["data"], "offsets": offsets, "rows": every}, {"width": width}

    def _encoded(self, entries: Entries, width: int) -> dict[str, torch.Tensor]:
        """The tensors of a matrix whose panels are all looked at."""
        place = entries.device
        panels, slices = grid(entries.shape, width)
        kind, number = _row_type(entries.shape[0])
        rows = torch.empty((panels, slices, number), dtype=kind, device=place)
        offsets, total = torch.zeros(panels * slices + 1, dtype=torch.int32, device=place), 0
        for some, starts, arranged in self._arranged(entries, width):
            rows[some], starts = arranged, starts + total
            total = int(starts[-1])
            self._refuse_more(total)
            offsets[some.start * slices : some.stop * slices + 1] = starts
        size = total * self.code.size(entries.dtype.itemsize)
        data = torch.zeros(size, dtype=torch.uint8, device=place)
        for some in _some_panels(panels, entries.shape[0]) if size else ():
            cpu.write_entries(self.code, entries, width, some, offsets, rows, data)
        return {"data": data, "offsets": offsets, "rows": rows}

    def _arranged(self, entries: Entries, width: int) -> Iterator[tuple]:
        """Which panels, and what :func:`arrange` says of them, some at a time."""
        for some in _some_panels(grid(entries.shape, width)[0], entries.shape[0]):
            lengths = cpu.count_entries(self.code, entries, width, some)
            yield some, *arrange(lengths, self.code.unit)

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
        dense = torch.zeros(shape, dtype=dtype, device=tensors["data"].device)
        if dense.numel() and tensors["data"].numel():
            _codec(dense).read(self.code, tensors, facts["width"], dense)
        return dense

    def read_entries(
        self,
        tensors: Mapping[str, torch.Tensor],
        facts: Mapping[str, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Iterator[Triplets]:
        """The entries that are not 0, some at a time."""
        return cpu.read_entries(self.code, tensors, facts["width"], shape[1], dtype)

    def nbytes(self, dense: torch.Tensor) -> int | None:
        """Bytes of what :meth:`encode` would make; None for a matrix it refuses. The host waits for
        them."""
        found = int(self.measure(dense))
        return None if found < 0 else found

    def measure(self, dense: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        """:meth:`nbytes` as an int64, -1 for None: on the matrix's device, without a
        synchronisation, or of few rows on the host. ``counts``, which other formats go by, are not
        needed."""
        dense = matrix(dense)
        if max(dense.shape) > MOST_SIZE:
            return torch.tensor(-1, dtype=torch.int64, device="cpu")
        width = panel_width(*dense.shape, dense.element_size())
        starts, rows = arrange(_codec(dense).count(self.code, dense, width), self.code.unit)
        held = rows.numel() * rows.element_size() + 4 * starts.numel()
        total = starts[-1]
        return torch.where(
            total > MOST_CODES, -1, total * self.code.size(dense.element_size()) + held
        )

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
        kind, number = _row_type(shape[0])
        check_tensors(
            self.code.name, tensors, {"data": torch.uint8, "offsets": torch.int32, "rows": kind}
        )
        check_facts(self.code.name, facts, ("width",))
        width, most = facts.get("width", 0), WIDEST // dtype.itemsize
        if width < 16 or width % 16 or width > most:
            raise ValueError(f"fact width must be a multiple of 16 up to {most}, got {width}")
        panels, slices = grid(shape, width)
        check_size("offsets", tensors["offsets"], (panels * slices + 1,))
        check_size("rows", tensors["rows"], (panels, slices, number))
        _check_sizes(self.code, tensors, shape, dtype)
        if panels:
            _check_columns(self.code, tensors, width, shape, dtype)


FORMATS = {code.name: SlicesFormat(code) for code in (U8, U4, U2)}


def _check_sizes(
    code: Code, tensors: Mapping[str, torch.Tensor], shape: tuple, dtype: torch.dtype
) -> None:
    """That slices lie in data one behind the other, and that panels have each row once."""
    offsets, rows, data = tensors["offsets"].long(), tensors["rows"], tensors["data"]
    wrong = ((offsets.diff() < 0) | (offsets[1:] % code.unit != 0)).sum()
    found = torch.stack([offsets[0], offsets[-1], wrong]).tolist()
    size = found[1] * code.size(dtype.itemsize)
    if found[0] != 0 or found[2] or tuple(data.shape) != (size,):
        raise ValueError(
            f"offsets must rise from 0, by multiples of {code.unit}, to the codes of a lane in "
            f"data, which are {size} bytes by its last entry; data has shape {tuple(data.shape)}"
        )
    known = cpu.numbers(rows).flatten(1)
    known = torch.where(known == -1, shape[0], known).sort().values  # lanes without one behind
    wanted = torch.arange(known.shape[1], dtype=torch.int64, device=rows.device)
    if bool((known != wanted.clamp_max(shape[0])).any()):
        raise ValueError(
            f"rows must be those of the matrix, 0 to {shape[0] - 1}, once in each panel, and else "
            "-1, of two bytes 65535"
        )


def _check_columns(
    code: Code,
    tensors: Mapping[str, torch.Tensor],
    width: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """That steps lead to columns of a panel, as kernels read x there; what fills up rows of u2 may
    go on to a whole unit of the last one's, where x ends in zeros."""
    offsets, (panels, slices) = tensors["offsets"].long(), grid(shape, width)
    steps = cpu.steps_of_lanes(code, tensors["data"], offsets, dtype.itemsize)
    columns = steps + code.least * (offsets.diff()[:, None] - 1)  # of each lane's last code
    last = shape[1] - (panels - 1) * width
    most = round_up(last, code.unit) if code.least else last
    whole = slices * (panels - 1)
    if bool((columns[:whole] >= width).any() | (columns[whole:] >= most).any()):
        raise ValueError(
            f"data must have steps to {width} columns of a panel, {last} of the last one, not "
            "beyond them"
        )


def panel_width(rows: int, cols: int, itemsize: int) -> int:
    """Columns of a panel, a multiple of 16: of all numbers of panels the one whose slices, taken a
    WAVE at a time, should be done first."""
    slices, cols, most = ceil_div(rows, LANES), max(cols, 1), MOST_WIDTH * 2 // itemsize
    fewest = ceil_div(cols, most)
    largest = max(fewest, cols // LEAST_WIDTH)
    # By their widths, of which there are few: the fewest panels of each.
    widths = range(ceil_div(cols, 16 * largest), ceil_div(cols, 16 * fewest) + 1)
    panels = {ceil_div(cols, 16 * width) for width in widths}

    def cost(width: int) -> tuple[int, int]:
        waves = ceil_div(slices * ceil_div(cols, width), WAVE)
        return waves * (width + SLICE_COST), -width

    return min((-(-cols // (16 * n)) * 16 for n in panels), key=cost)


def arrange(lengths: torch.Tensor, unit: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the codes of each (panel, row): int64 starts of all slices and their end, and rows."""
    panels, count = lengths.shape
    slices = ceil_div(count, LANES)
    padded = torch.nn.functional.pad(lengths, (0, slices * LANES - count), value=-1)
    ordered, rows = torch.sort(padded, dim=1, descending=True, stable=True)
    order = slice_order(slices, lengths.device)
    ordered = ordered.view(panels, slices, LANES)[:, order]
    rows = rows.view(panels, slices, LANES)[:, order]
    rows = torch.where(ordered < 0, -1, rows)
    longest = ordered[:, :, 0].clamp_min(0).reshape(-1).to(torch.int64)
    longest = (longest + unit - 1) // unit * unit
    starts = torch.nn.functional.pad(longest.cumsum(0), (1, 0))
    if _row_type(count)[0] == torch.uint8:
        return starts, rows.to(torch.int16).contiguous().view(torch.uint8)
    return starts, rows.to(torch.int32).contiguous()


def _some_panels(panels: int, rows: int) -> Iterator[slice]:
    """All panels, as many at a time as are counted together."""
    step = max(1, CELLS // max(LANES, rows))  # lanes of a slice are counted, be they of rows or not
    for first in range(0, panels, step):
        yield slice(first, min(panels, first + step))


def slice_order(slices: int, device: torch.device) -> torch.Tensor:
    """Which slice of the sorted ones is at each place: by reversed bits (van der Corput), so that
    the slices of any run are as long as others are."""
    index = torch.arange(slices, dtype=torch.int64, device=device)
    turned = torch.zeros_like(index)
    for bit in range(max(slices - 1, 0).bit_length()):
        turned = turned * 2 + (index >> bit & 1)
    return torch.argsort(turned)


def _row_type(rows: int) -> tuple[torch.dtype, int]:
    """What rows are held as, and elements for a slice. Bytes, not int16: no collective takes that,
    and so no ``DistributedDataParallel`` a module that holds it."""
    return (torch.uint8, 2 * LANES) if rows <= SHORT_ROWS else (torch.int32, LANES)


def _codec(dense: torch.Tensor) -> ModuleType:
    """The module that counts, writes and reads codes where a matrix lies."""
    if not dense.is_cuda and not (dense.is_meta and on_gpu(dense.device)):
        return cpu
    from kernlib.families.sparse.formats import slices_gpu as gpu

    return gpu
