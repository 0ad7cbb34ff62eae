"""The kernel slices/parts.cuh of kernel_sources/sparse: products with the formats u8, u4 and u2
where one panel has all columns and rows may be cut into parts. One launch is a product.

It begins before what came before it has ended, and waits for that. Of a frozen matrix, which
nothing writes, it reads the matrix, never x, before it waits.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.codes import (
    LANES,
    MOST_SIZE,
    SHORT_ROWS,
    WIDEST_IN_PARTS,
    Code,
)
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.fields import Fields
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step

COLUMNS = (8, 4, 2, 1)  # vectors that a block takes at a time
MOST_COLUMNS = 16  # that one call takes
FEW_COLUMNS, FEW_ROWS = 2, 8192  # of matrices of one panel for which one launch is faster
WARPS = 32  # of a multiprocessor with 64 registers a thread
FEW_WARPS = 16  # the same with 128, of which more hold codes that are on their way
BLOCK_WARPS = (8, 16, 32)
SMALL_SHARED = 32 * 1024
FIXED = Fields((
    "i64 x_stride", "i64 out_column_stride", "i64 out_row_stride",
    "u32 slices",     # of 32 rows
    "u32 row_pitch",  # of rows, from slice to slice
    "u32 parts",      # of a slice: a warp each
    "u32 slots",      # slices that a block takes at a time
    "u32 step",       # slices that all blocks of a chunk take at a time
    "u32 chunks",     # of COLUMNS vectors
    "u32 cols", "u32 columns", "u32 unused",
    "u32 ahead",      # last: whether the matrix may be read before prerequisites end
))  # fmt: skip


class Variant(NamedTuple):
    """Everything that code generation chooses. ``depth`` groups of codes are read ahead, and
    ``shared`` bytes hold sums and x."""

    code: Code
    dtype: str
    rows: str  # CUDA type of rows
    columns: int
    threads: int
    blocks: int
    depth: int
    shared: int


def takes(problem: Problem) -> bool:
    """Whether :func:`lower` takes a problem: all of rows that are cut, and of others that have one
    panel those of few vectors, or few slices. Copies of x pay for the others."""
    width, itemsize = problem.fact("width"), DTYPES[problem.dtype].bytes
    if problem.dtype not in FLOAT_SUMS or not 1 <= problem.columns <= MOST_COLUMNS:
        return False
    if not 0 < problem.cols <= width <= WIDEST_IN_PARTS // itemsize:
        return False
    few = problem.columns <= FEW_COLUMNS or problem.rows <= FEW_ROWS
    return problem.rows <= MOST_SIZE and (few or parts_of(problem) > 1)


def lower(
    code: Code,
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
) -> Lowered:
    """The launch of a product."""
    parts, slices = parts_of(problem), ceil_div(problem.rows, LANES)
    chosen = variant(code, problem, arch, multiprocessors)
    slots = _slots(chosen.threads // 32, parts, slices, multiprocessors)
    chunks = ceil_div(problem.columns, chosen.columns)
    resident = max(1, multiprocessors * chosen.blocks // chunks)
    blocks = min(ceil_div(slices, slots), resident)
    values = FIXED.values(
        x_stride=problem.x_stride,
        out_column_stride=problem.out_strides[0],
        out_row_stride=problem.out_strides[1],
        slices=slices,
        row_pitch=LANES * (1 + parts if parts > 1 else 1),
        parts=parts,
        slots=slots,
        step=blocks * slots,
        chunks=chunks,
        cols=problem.cols,
        columns=problem.columns,
        unused=0,
        ahead=0,
    )
    names = ("data", "offsets", "rows", "x", "out")
    step = Step(
        spec(chosen, epilogue),
        (blocks * chunks, 1),
        _parameters(epilogue).pack(*values),
        (*((name, 0) for name in names), *text.vector_pointers(epilogue)),
        text.scalar_count(epilogue),
        overlaps=arch in OVERLAPPING,
    )
    return Lowered((step,))


def parts_of(problem: Problem) -> int:
    """Into how many parts rows are cut."""
    return dict(problem.facts).get("parts", 1)


def variant(code: Code, problem: Problem, arch: str, multiprocessors: int) -> Variant:
    """The variant for a problem: for all vectors at a time, if shared memory holds them."""
    parts, rows = parts_of(problem), "u16" if problem.rows <= SHORT_ROWS else "u32"
    itemsize, limit = DTYPES[problem.dtype].bytes, targets.SHARED_BYTES[arch]
    slices = ceil_div(problem.rows, LANES)
    # Codes that fill up parts lead a little beyond the last column; nothing is read for them.
    wide = round_up(problem.cols, LANES) + 4 * parts
    for columns in COLUMNS:
        if columns > 1 and columns // 2 >= problem.columns:
            continue
        if _needs_few(itemsize, columns, arch) and parts > FEW_WARPS:
            continue
        few = _needs_few(itemsize, columns, arch) or (
            rows == "u16" and parts * slices <= FEW_WARPS * multiprocessors
        )
        most = FEW_WARPS if _needs_few(itemsize, columns, arch) else WARPS
        warps = _warps(parts, slices, FEW_WARPS if few else WARPS, most, multiprocessors)
        threads, blocks, depth = _shape(code, itemsize, columns, warps, few, arch)
        needed = wide * columns * itemsize + threads * columns * 4
        for shared, resident in _shared_sizes(arch, columns, blocks):
            if needed <= shared:
                sizes = threads, resident, depth, shared
                return Variant(code, problem.dtype, rows, columns, *sizes)
    raise ValueError(f"x of {problem.cols} columns needs {needed} of {limit} bytes")


def _needs_few(itemsize: int, columns: int, arch: str) -> bool:
    """Whether a thread needs more than 64 registers, of which ptxas takes more for Blackwell."""
    return itemsize * columns >= (8 if arch.startswith("sm_1") else 16)


def _slots(warps: int, parts: int, slices: int, multiprocessors: int) -> int:
    """Slices that a block takes at a time."""
    return min(warps // parts, ceil_div(slices, multiprocessors))


def _warps(parts: int, slices: int, resident: int, most: int, multiprocessors: int) -> int:
    """Warps of a block, of ``resident`` of a multiprocessor, ``most`` at the most: those with which
    none has many more slices than others, and fewest are idle."""

    def cost(warps: int) -> tuple[int, int, int]:
        slots = _slots(warps, parts, slices, multiprocessors)
        blocks = ceil_div(slices, slots)
        at_a_time = multiprocessors * max(1, resident // warps)
        rounds = ceil_div(blocks, at_a_time)
        busiest = rounds * ceil_div(min(blocks, at_a_time), multiprocessors) * slots
        return busiest, warps - slots * parts, warps

    return min((n for n in BLOCK_WARPS if parts <= n <= most), key=cost)


def _shape(
    code: Code, itemsize: int, columns: int, warps: int, few: bool, arch: str
) -> tuple[int, int, int]:
    """Threads, blocks of a multiprocessor, and groups that are read ahead."""
    wide = itemsize == 4
    if few and warps < WARPS:
        codes = 16 if wide and columns >= 4 else 32 if wide or columns > 2 else 64
        return 32 * warps, FEW_WARPS // warps, max(1, codes // code.whole)
    codes = 16 if wide else 24 if columns == 4 and code.bits == 4 else 32
    if arch.startswith("sm_1"):
        codes = 8 if wide else 16
    return 32 * warps, WARPS // warps, max(1, codes // code.whole)


def _shared_sizes(arch: str, columns: int, blocks: int) -> list[tuple[int, int]]:
    """Bytes of shared memory that a block asks for, and how many blocks a multiprocessor holds
    then: little, the share of each of ``blocks``, and all."""
    reserved = targets.RESERVED_SHARED_BYTES
    limit = targets.SHARED_BYTES[arch] + reserved
    sizes = {SMALL_SHARED: blocks} if columns <= 2 and blocks * SMALL_SHARED < limit else {}
    return [*(sizes | {limit // blocks - reserved: blocks, limit - reserved: 1}).items()]


def variants(
    code: Code, epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose."""
    specs = {}
    for dtype, columns, warps, few in product(dtypes, COLUMNS, BLOCK_WARPS, (False, True)):
        itemsize = DTYPES[dtype].bytes
        if _needs_few(itemsize, columns, arch) and (not few or warps > FEW_WARPS):
            continue
        threads, blocks, depth = _shape(code, itemsize, columns, warps, few, arch)
        for shared, resident in _shared_sizes(arch, columns, blocks):
            for rows in (
                ("u16",) if few and not _needs_few(itemsize, columns, arch) else ("u16", "u32")
            ):
                sizes = threads, resident, depth, shared
                specs[spec(Variant(code, dtype, rows, columns, *sizes), epilogue)] = None
    return list(specs)


def _parameters(epilogue: tuple[Epilogue, ...]):
    return text.parameters(5, FIXED.format, epilogue)


def spec(variant: Variant, epilogue: tuple[Epilogue, ...]) -> KernelSpec:
    """The KernelSpec of a variant."""
    code, dtype, rows, columns, threads, blocks, depth, shared = variant
    source = f"""{text.preamble(dtype, dtype, epilogue)}
using RowT = {rows};

constexpr int STEP_BITS = {code.bits};
constexpr int COLUMNS = {columns};
constexpr int THREADS = {threads};
constexpr int BLOCKS = {blocks};
constexpr int DEPTH = {depth};
constexpr int PARAMETER_BYTES = {_parameters(epilogue).size};

{FIXED.text()}
#include "sparse/slices/parts.cuh"
"""
    words = [code.name, f"{columns} columns", f"{threads}x{blocks} threads", f"rows {rows}"]
    description = text.describe("sparse", "parts", dtype, "fp32", words, epilogue)
    kernel = KernelSpec("sparse", source, "sparse_parts", threads, shared, description=description)
    words = code.name, dtype, f"vectors={columns} {threads}x{blocks}x{depth} rows {rows}"
    return named(kernel, *words, epilogue=epilogue)
