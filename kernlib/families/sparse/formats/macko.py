"""The format of MACKO-SpMV with 4-bit codes, byte for byte: values, and gaps between them.

A row is walked from its left with ``gap = 0``. An entry is stored where the value is not zero or
``gap == 15``, its code is ``gap``, and ``gap`` begins anew; else ``gap += 1``. The sixteenth zero
of a run is thus an entry of its own, a pad; pads behind the last value of a row are left out.

- ``values`` (P,), the entries of all rows one after the other, and zeros to a multiple of 8;
- ``deltas`` (P / 2,) uint8, two codes a byte: of even entries in the low bits;
- ``row_ptr`` (R + 1,), the first entry of each row, int32, or int64 where P >= 2^31.

The column of entry k of a row is the sum of its codes up to and with that of k, plus k. Values of
float16 are what MACKO stores, bfloat16 and float32 kernlib's extension. As there, -0.0 counts as
zero, and comes back as 0 unless it is where a pad stands; every NaN comes back as the one whose
bits are ones behind the sign. Uniformly random matrices take ``1.25 d / (1 - (1 - d)^16)`` of the
dense bytes at density d, less than bitmap or u8 from 0.1 to 0.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.sparse.formats import encoding
from kernlib.families.sparse.formats.encoding import INFINITY, MAGNITUDE, readable
from kernlib.families.sparse.formats.entries import SLAB, Entries, Slab, Triplets
from kernlib.lowering.arithmetic import round_up
from kernlib.runtime.rehearsal import on_gpu

FORMAT = "macko"
TENSORS = ("values", "deltas", "row_ptr")
FACTS = ("entries", "longest", "busiest", "nnz")
PADDED = 8  # entries, to a multiple of which the stream is padded
WIDE_FROM = 2**31  # entries from which row_ptr takes int64
MOST_COLUMNS = 2**31 - 1  # on a GPU, whose kernels count the entries of a row by 32 bits
BLOCK = 32  # rows, of which ``busiest`` tells the entries
LAST_CODE = 15


def encode(dense: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The tensors of a matrix (R, C) of float16, bfloat16 or float32 and any strides, where it
    lies, and what lowering asks: ``entries`` (P), ``longest`` (entries of the longest row),
    ``busiest`` (of the 32 rows with most, counted from multiples of 32), and ``nnz``, entries that
    are no pads. On a GPU two kernels, and one synchronisation to learn the size.

    Raises TypeError or ValueError for what is no such matrix, UnsupportedError on a GPU for 2^31
    columns or more.
    """
    dense = encoding.matrix(dense)
    if dense.device.type == "cpu":
        return _encode_cpu(dense)
    _refuse_wide(dense)
    gpu = _gpu()
    dense = readable(dense)
    counts, nnz = gpu.row_counts(dense)
    row_ptr, facts = _rows(counts, nnz)
    row_ptr = encoding.moved(row_ptr, dense.device)
    values, deltas = gpu.fill(dense, row_ptr, facts["entries"])
    return dict(zip(TENSORS, (values, deltas, row_ptr), strict=True)), facts


def measure_entries(entries: Entries) -> int | None:
    """:func:`nbytes` of a matrix by its entries."""
    if _is_too_wide(entries):
        return None
    count = sum(int(_taken(slab)[1].sum()) for slab in _slabs(entries))
    return bytes_of(count, entries.shape, entries.dtype.itemsize)


def bytes_of(entries: int, shape: tuple[int, int], itemsize: int) -> int:
    """Bytes of a matrix with so many entries, pads among them."""
    padded = round_up(entries, PADDED)
    return padded * itemsize + padded // 2 + (4 if padded < WIDE_FROM else 8) * (shape[0] + 1)


def encode_entries(entries: Entries) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """:func:`encode` of a matrix by its entries."""
    _refuse_wide(entries)
    counts = torch.zeros(entries.shape[0], dtype=torch.int64, device=entries.device)
    for slab in _slabs(entries):
        counts[slab.first : slab.last].index_add_(0, slab.rows, _taken(slab)[1])
    row_ptr, facts = _rows(counts, entries.nnz)
    count, last = facts["entries"], int(row_ptr[-1])
    values = torch.zeros(count, dtype=entries.dtype, device=entries.device)
    deltas = torch.full((count // 2,), 255, dtype=torch.uint8, device=entries.device)  # of pads
    behind = torch.arange(last, count, dtype=torch.int64, device=entries.device)
    _set_codes(deltas, behind, torch.zeros_like(behind))
    for slab in entries.slabs():
        _fill_entries(slab, int(row_ptr[slab.first]), values, deltas)
    return dict(zip(TENSORS, (values, deltas, row_ptr), strict=True)), facts


def _slabs(entries: Entries) -> Iterator[Slab]:
    for slab in entries.slabs():
        yield slab.present()


def _fill_entries(slab: Slab, start: int, values: torch.Tensor, deltas: torch.Tensor) -> None:
    """Write the entries of some rows, the first of which begin at ``start``, over pads."""
    present, step = slab.present(), LAST_CODE + 1
    before, count = _taken(present)
    ends = start + count.cumsum(0)
    stored = encoding.bits(values)
    stored[ends - 1] = _canonical(present.bits, values.dtype)
    _set_codes(deltas, ends - 1, (present.columns - before - 1) % step)
    if present.rows.numel() == slab.rows.numel():
        return
    # A stored -0.0 where a pad stands: behind the entry before it by steps, and before another.
    zeros = (~encoding.nonzero(slab.bits) & (slab.bits != 0)).nonzero()[:, 0]
    number = encoding.nonzero(slab.bits).cumsum(0)[zeros]  # of the entry behind it
    zeros, number = zeros[number < ends.numel()], number[number < ends.numel()]
    steps = slab.columns[zeros] - before[number]
    is_pad = (slab.rows[zeros] == present.rows[number]) & (steps % step == 0)
    places = (ends - count)[number] + steps // step - 1
    stored[places[is_pad]] = slab.bits[zeros[is_pad]]


def _set_codes(deltas: torch.Tensor, places: torch.Tensor, codes: torch.Tensor) -> None:
    """Write codes where the last code stands."""
    less = (LAST_CODE - codes) << places % 2 * 4
    deltas.index_add_(0, places // 2, (256 - less).to(torch.uint8))  # one byte may have two


def _taken(slab: Slab) -> tuple[torch.Tensor, torch.Tensor]:
    """For each nonzero entry the column of the one before it in its row (-1 for none), and the
    number of entries that it becomes with the pads before it."""
    before = torch.full_like(slab.columns, -1)
    before[1:] = torch.where(slab.rows[1:] == slab.rows[:-1], slab.columns[:-1], -1)
    return before, (slab.columns - before - 1) // (LAST_CODE + 1) + 1


def decode(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense matrix, contiguous, with its bits as they were except for -0.0 and NaNs. Without a
    synchronisation on a GPU."""
    values, deltas, row_ptr = (tensors[name] for name in TENSORS)
    if on_gpu(values.device):
        return _gpu().decode(values, deltas, row_ptr, tuple(shape))
    out = torch.zeros(shape, dtype=dtype, device=values.device)
    counts = row_ptr.diff().to(torch.int64)
    rows = torch.repeat_interleave(counts)
    ends = _widths(deltas, rows.numel()).cumsum(0)
    first = row_ptr[:-1].to(torch.int64)
    before = torch.nn.functional.pad(ends, (1, 0))[first]
    columns = ends - before[rows] - 1
    encoding.bits(out)[rows, columns] = encoding.bits(values[: rows.numel()])
    return out


def read_entries(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Iterator[Triplets]:
    """The entries that are not 0, some at a time."""
    values, deltas, row_ptr = (tensors[name] for name in TENSORS)
    last, carry = int(row_ptr[-1]), 0  # columns that the first row has passed before a slab
    for first in range(0, last, SLAB):
        at = torch.arange(first, min(first + SLAB, last), dtype=torch.int64, device=values.device)
        rows = torch.searchsorted(row_ptr, at.to(row_ptr.dtype), right=True) - 1
        widths = (deltas[at // 2] >> at % 2 * 4 & LAST_CODE).long() + 1
        behind = torch.nn.functional.pad(widths.cumsum(0), (1, 0))
        begins = row_ptr[rows[0] : rows[-1] + 1].long() - first  # of the rows of these entries
        before = behind[begins.clamp_min(0)]
        before[:1] -= torch.where(begins[:1] < 0, carry, 0)
        columns = behind[1:] - before[rows - rows[0]] - 1
        carry = behind[-1] - before[-1]
        bits = encoding.bits(values[first : first + at.numel()])
        mask = encoding.nonzero(bits)
        yield Triplets(rows[mask], columns[mask], bits[mask])


def measure(dense: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes that :func:`encode` would take, below 0 if it refuses the matrix: one number, int64, on
    the device of the matrix, without a synchronisation, or of few rows on the host."""
    dense = encoding.matrix(dense)
    if _is_too_wide(dense):
        return torch.tensor(-1, dtype=torch.int64, device="cpu")
    if dense.device.type == "cpu":
        from kernlib.families.sparse.formats.slices_dense import MACKO, counts  # not for GPUs

        key = MACKO, max(1, dense.shape[1])
        entries = counts(dense, [key])[key].sum(dtype=torch.int64)
    else:
        gpu = _gpu()
        entries = gpu.row_counts(readable(dense))[0].sum(dtype=torch.int64)
    padded = (entries + PADDED - 1) // PADDED * PADDED
    width = torch.where(padded < WIDE_FROM, 4, 8)
    return padded * dense.element_size() + padded // 2 + width * (dense.shape[0] + 1)


def nbytes(dense: torch.Tensor) -> int | None:
    """Bytes that :func:`encode` would take; None for a matrix that it refuses."""
    size = int(measure(dense))
    return None if size < 0 else size


def _is_too_wide(matrix: torch.Tensor | Entries) -> bool:
    """Whether kernels may count the entries of a row wrongly."""
    return matrix.device.type == "cuda" and matrix.shape[1] > MOST_COLUMNS


def _refuse_wide(matrix: torch.Tensor | Entries) -> None:
    """Raises UnsupportedError for a matrix whose entries kernels may count wrongly."""
    if _is_too_wide(matrix):
        raise UnsupportedError(
            f"MACKO's format counts the entries of a row by 32 bits on a GPU: compress slices of "
            f"the columns of a matrix of shape {tuple(matrix.shape)}"
        )


def check(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Raises ValueError, naming what is wrong, unless tensors and facts are such as
    :func:`encode` makes for this shape and dtype, as far as memory is concerned: sizes, facts, and
    no column beyond the last one. Synchronises."""
    encoding.check_facts(FORMAT, facts, FACTS)
    entries = facts.get("entries", -1)
    if entries < 0 or entries % PADDED:
        raise ValueError(f"the fact entries must be a multiple of {PADDED}, got {entries}")
    wide = torch.int64 if entries >= WIDE_FROM else torch.int32
    dtypes = {"values": dtype, "deltas": torch.uint8, "row_ptr": wide}
    encoding.check_tensors(FORMAT, tensors, dtypes)
    values, deltas, row_ptr = (tensors[name] for name in TENSORS)
    encoding.check_size("values", values, (entries,))
    encoding.check_size("deltas", deltas, (entries // 2,))
    encoding.check_size("row_ptr", row_ptr, (shape[0] + 1,))
    last = check_stream(tensors, shape, PADDED - 1)
    nnz = encoding.nonzero(encoding.bits(values[:last])).sum()
    for name, expected in _rows(row_ptr.to(torch.int64).diff(), nnz)[1].items():
        if facts.get(name) != expected:
            raise ValueError(f"the fact {name} must be {expected}, got {facts.get(name)}")


def check_stream(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], padding: int | None = None
) -> int:
    """The number of entries. Raises ValueError unless rows lie one behind the other in the stream,
    behind them at most so much ``padding``, and no step leads beyond the last column: so nothing
    that reads the matrix leaves its tensors. Their dtypes and sizes must have been checked.
    Synchronises."""
    values, deltas, row_ptr = (tensors[name] for name in TENSORS)
    falls = (row_ptr[1:] < row_ptr[:-1]).sum()  # compared, as differences may wrap
    ends = torch.stack([end.to(torch.int64) for end in (row_ptr[0], row_ptr[-1], falls)])
    (first, last, falling), entries = ends.tolist(), values.numel()
    most = entries if padding is None else padding
    if first != 0 or falling or not entries - most <= last <= entries:
        raise ValueError(
            f"row_ptr must rise from 0 to {entries} less at most {most} entries of padding, got "
            f"{first} to {last}" + (", falling in between" if falling else "")
        )
    if last:
        widest = int(passed(deltas, row_ptr.to(torch.int64)).diff().max())
        if widest > shape[1]:
            raise ValueError(
                f"deltas must lead to {shape[1]} columns at most, got {widest} in a row"
            )
    return last


def passed(deltas: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The columns that the entries before each of ``places`` pass, with their own, int64: by sums
    of eight codes, as one for each entry would take 24 bytes."""
    groups = deltas.view(-1, PADDED // 2)
    sums = ((groups & LAST_CODE) + (groups >> 4)).sum(1, dtype=torch.int64)
    group, inside = places // PADDED, places % PADDED
    before = torch.nn.functional.pad(sums.cumsum(0), (1, 0))[group]
    pairs = groups[group.clamp_max(len(groups) - 1)]
    codes = torch.stack((pairs & LAST_CODE, pairs >> 4), 2).flatten(1)
    number = torch.arange(PADDED, dtype=torch.int64, device=deltas.device)
    return before + places + (codes * (number < inside[:, None])).sum(1, dtype=torch.int64)


def facts_of(row_ptr: torch.Tensor, nnz: int = 0) -> dict[str, int]:
    """The facts of a matrix with these rows. Synchronises."""
    return _rows(row_ptr.diff(), nnz)[1]


def _rows(counts: torch.Tensor, nnz: torch.Tensor | int) -> tuple[torch.Tensor, dict[str, int]]:
    """row_ptr and facts of rows with so many entries, with one synchronisation."""
    ends = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=ends[1:])
    blocks = torch.nn.functional.pad(counts, (0, -counts.numel() % BLOCK))
    busy = blocks.view(-1, BLOCK).sum(1, dtype=torch.int64)
    total = torch.as_tensor(nnz, dtype=torch.int64, device=counts.device).reshape(1)
    most = [t.max().reshape(1) if t.numel() else ends[:1] for t in (counts, busy)]
    numbers = torch.cat((ends[-1:], most[0].to(torch.int64), most[1], total)).tolist()
    entries = round_up(numbers[0], PADDED)
    row_ptr = ends if entries >= WIDE_FROM else ends.to(torch.int32)
    return row_ptr, dict(zip(FACTS, (entries, *numbers[1:]), strict=True))


def _runs(dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For the values other than zero, by row: their rows, their columns, the column of the value
    before (-1 for none), and the number of entries that each becomes with the pads before it."""
    rows, columns = encoding.nonzero(encoding.bits(dense)).nonzero(as_tuple=True)
    return rows, columns, *_taken(Slab(0, dense.shape[0], rows, columns, rows))


def _encode_cpu(dense: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    dense = dense.contiguous()
    bits, step = encoding.bits(dense), LAST_CODE + 1
    rows, columns, before, code_counts = _runs(dense)
    counts = rows.new_zeros(dense.shape[0]).index_add_(0, rows, code_counts)
    row_ptr, facts = _rows(counts, rows.numel())
    ends = code_counts.cumsum(0)
    pads = code_counts - 1
    owner = torch.repeat_interleave(pads)
    nth = torch.arange(owner.numel(), dtype=torch.int64, device=dense.device)
    nth -= (pads.cumsum(0) - pads)[owner]
    values = dense.new_zeros(facts["entries"])
    codes = torch.zeros(facts["entries"], dtype=torch.uint8, device=dense.device)
    stored = encoding.bits(values)
    stored[ends - 1] = _canonical(bits[rows, columns], dense.dtype)
    codes[ends - 1] = ((columns - before - 1) % step).to(torch.uint8)
    places = (ends - code_counts)[owner] + nth
    stored[places] = bits[rows[owner], before[owner] + step * (nth + 1)]
    codes[places] = LAST_CODE
    deltas = codes[0::2] | codes[1::2] << 4
    return dict(zip(TENSORS, (values, deltas, row_ptr), strict=True)), facts


def _canonical(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits of values, with one pattern for all NaNs."""
    ones = MAGNITUDE[dtype]
    return torch.where(bits & ones > INFINITY[dtype], ones, bits)


def _widths(deltas: torch.Tensor, entries: int) -> torch.Tensor:
    """The columns that each of the first entries passes, with its own, int64."""
    codes = torch.stack((deltas & LAST_CODE, deltas >> 4), 1).reshape(-1)
    return codes[:entries].to(torch.int64) + 1


def _gpu():
    """The module of kernels, which CPU tensors do not load."""
    from kernlib.families.sparse.formats import macko_gpu

    return macko_gpu
