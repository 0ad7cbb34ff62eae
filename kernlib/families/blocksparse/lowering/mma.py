"""What products by mma.sync share: how far 16-byte copies run, how numbers are multiplied, and how
long stages take.

Microseconds are fitted to what an H100 of 132 multiprocessors took for the random calls of
``python -m benchmarks.auto``, by each kernel with each number of parts, of layouts whose slots all
hold a block, anywhere. Only comparisons count.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.blocksparse.lowering import summands
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd, Spmm
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES

MOST_X, MOST_Y = 2**31 - 1, 65535  # of a grid
INCLUDES = ("common/math.cuh", "blocksparse/access.cuh", summands.HEADER)
CHUNK_BYTES = 16
PASS_LINES = 32  # of sums that a warp stages at a time
LARGE_SHARED = 128 * 1024  # from which on a block has one more stage
ADDING_UP = 1.0  # of the launch of parts.cuh behind another
BYTES = 3.6e6  # a microsecond, of results and of parts


class Rate(NamedTuple):
    """Of a stage: where a block of threads has a multiprocessor for itself, what each further one
    there adds, and how many of them are faster than one after the other."""

    alone: float
    more: float
    resident: int


def microseconds(blocks: int, each: float, rate: Rate, multiprocessors: int) -> float:
    """Of so many blocks of threads with so many stages each."""
    together = min(ceil_div(blocks, multiprocessors), rate.resident)
    rounds = max(1.0, blocks / (multiprocessors * rate.resident))
    return each * rounds * (rate.alone + rate.more * (together - 1))


def adding_up(elements: int, parts: int) -> float:
    """What it takes to write and to read so many sums in parts, 0 for one part."""
    return ADDING_UP + 8 * elements * parts / BYTES if parts > 1 else 0.0


def numbers(dtypes: tuple[str, ...], precision: str | None) -> list[tuple[str, str]]:
    """Each dtype with its precision, or both of float32's if that is None."""
    of_floats = ("fp32", "tf32") if precision is None else (precision,)
    return [
        (dtype, each)
        for dtype in dtypes
        for each in (of_floats if dtype == "float32" else ("fp32",))
    ]


def is_split(dtype: str, precision: str) -> bool:
    """Whether numbers are words of TF32 and what is left of them."""
    return dtype == "float32" and precision == "fp32"


def access(
    dtype: str, t: Dense, batches: tuple[int, int], lines: int | None, columns: int | None
) -> str:
    """How far 16-byte copies can run along a dense operand's lines ("depth") or its columns
    ("line"): whole ones, of strides and addresses that are whole ones. ``batches`` are those and
    the heads, ``lines`` and ``columns`` None where they are whole blocks."""
    chunk = CHUNK_BYTES // DTYPES[dtype].bytes
    outer = [stride for stride, count in zip(t[:2], batches, strict=True) if count > 1]
    if t.alignment % CHUNK_BYTES or any(stride % chunk for stride in outer):
        return "gather"
    along = lines is None or lines % chunk == 0
    if t.line == 1 and along and (columns == 1 or t.column % chunk == 0):
        return "depth"
    along = columns is None or columns % chunk == 0
    if t.column == 1 and along and (lines == 1 or t.line % chunk == 0):
        return "line"
    return "gather"


def has_chunks(problem: Spmm | Sdd) -> bool:
    """Whether rows of stored blocks are read and written by 16 bytes."""
    values, chunk = problem.values, CHUNK_BYTES // DTYPES[problem.dtype].bytes
    slot = values.slot if problem.blocks.capacity > 1 else 0
    apart = values.batch if problem.batch > 1 else 0, slot, values.row
    is_aligned = values.alignment % CHUNK_BYTES == 0 and not any(stride % chunk for stride in apart)
    return values.column == 1 and is_aligned


def values_access(problem: Spmm) -> str:
    """Of blocks whose rows lie side by side, or of nothing."""
    if not has_chunks(problem):
        return "gather"
    return "line" if problem.transposed else "depth"


def stages(few: int, arch: str) -> int:
    """Stages under way, of so many in little shared memory: one more where there is room for it."""
    return few + (targets.SHARED_BYTES[arch] >= LARGE_SHARED)


def waiting_bytes(warps: int, lines: int, columns: int, along_lines: bool) -> int:
    """Sums on their way to the result: see store.cuh."""
    lines = min(lines, PASS_LINES)
    return 4 * warps * (columns * (lines + 4) if along_lines else lines * (columns + 8))
