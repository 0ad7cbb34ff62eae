"""The kernels slices/slices.cuh and slices/reduce.cuh of kernel_sources/sparse: products with the
formats u8, u4 and u2.

The first adds up each row's products in each panel of columns, the second adds panels, in order,
and applies epilogues: so the result does not depend on the order in which blocks run, and there is
no counter to reset. Both begin before what came before them has ended, and wait for that. Of a
frozen matrix, which nothing writes, the first reads the matrix, never x, before it waits.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering import parts
from kernlib.families.sparse.lowering.codes import (
    MOST_SIZE,
    SHORT_ROWS,
    U2,
    U4,
    U8,
    WIDEST,
    Code,
    grid,
)
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step

MOST_COLUMNS = 16  # columns of x that one call takes
COLUMNS = (1, 2, 4, 8)  # that a block takes at a time
COUNTER_BYTES = 16  # of shared memory, before x
COPIED = 128  # bytes of a column of x that lies in copies
# Bytes of x that a block holds, by COLUMNS: several panels of one vector, one of 8 at the least.
SHARED = {1: 24 * 1024, 2: 40 * 1024, 4: 40 * 1024, 8: 40 * 1024}
COPIES_SHARED = (64 * 1024, 224 * 1024)  # of a panel of 512 columns, of 1792
PARAMETERS = Parameters(5, "<q10I")
REDUCE_ROWS, REDUCE_THREADS = 32, 256  # of a block
REDUCE_FIXED = "<2q4I"
MOST_SLICES = 2**31 - 2**16  # that an unsigned index and its next steps hold
LEAST_BUSY = 0.8  # part of all blocks that panels with blocks of their own must leave
FEW_SLICES = 16  # of a multiprocessor, up to which half its warps do


class Shape(NamedTuple):
    """Threads of a block, blocks of a multiprocessor, and groups of codes read ahead."""

    threads: int
    blocks: int
    depth: int


class Variant(NamedTuple):
    """Everything that code generation chooses. ``shared`` bytes of x, in copies or as it is."""

    code: Code
    dtype: str
    rows: str  # CUDA type of rows
    columns: int
    copies: int
    shared: int
    shape: Shape


class SlicesKernels(NamedTuple):
    """What :mod:`kernlib.families.sparse.lowering.choose` asks of a format, by the code of its
    steps."""

    code: Code

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether :meth:`lower` takes a problem: all of 1 to MOST_COLUMNS columns that can be
        counted, of panels that shared memory holds."""
        if parts.takes(problem):
            return True
        width = problem.fact("width")
        if (
            problem.dtype not in FLOAT_SUMS
            or not 0 < width <= WIDEST // DTYPES[problem.dtype].bytes
        ):
            return False
        if max(problem.rows, problem.cols) > MOST_SIZE:
            return False
        panels, slices = grid((problem.rows, problem.cols), width)
        return 1 <= problem.columns <= MOST_COLUMNS and panels * slices < MOST_SLICES

    def lower(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
    ) -> Lowered:
        """The launch of a product, or two for panels; of these the second alone where there are no
        columns, none where there are no rows."""
        if not problem.rows:
            return Lowered(())
        if parts.takes(problem):
            return parts.lower(self.code, epilogue, problem, arch, multiprocessors)
        last = _reduce(epilogue, problem, arch)
        width = problem.fact("width")
        panels, slices = grid((problem.rows, problem.cols), width)
        if not panels:
            return Lowered((last,), 16)
        made = variant(self.code, problem, arch, multiprocessors)
        chunks = ceil_div(problem.columns, made.columns)
        blocks = max(1, multiprocessors * made.shape.blocks // chunks)
        ranges = _ranges(panels, slices, blocks, made.copies > 1)
        fixed = PARAMETERS.pack(
            problem.x_stride, panels * slices, slices, width, problem.rows, problem.cols,
            problem.columns, chunks, ranges, held(made, width), 0,
        )  # fmt: skip
        pointers = tuple((name, 0) for name in ("data", "offsets", "rows", "x", "workspace"))
        overlaps = arch in OVERLAPPING
        first = Step(spec(made), (ranges * chunks, 1), fixed, pointers, overlaps=overlaps)
        return Lowered((first, last), 4 * panels * problem.columns * problem.rows)

    def ahead(self, step: Step) -> Step:
        """The first launch, of a frozen matrix: see kernlib/families/sparse/tensors.py."""
        return step._replace(fixed=step.fixed[:-4] + struct.pack("<I", 1))

    def variants(
        self, epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
    ) -> list[KernelSpec]:
        """Every spec that :meth:`lower` can choose for one to MOST_COLUMNS columns."""
        specs = parts.variants(self.code, epilogue, dtypes, arch)
        for dtype in dtypes:
            for rows in ("u16", "u32"):
                for columns in COLUMNS:
                    for copies, shared in _holdings(dtype, columns, arch):
                        for few in (False, True):
                            shape = shape_of(self.code, dtype, columns, copies, few)
                            made = Variant(self.code, dtype, rows, columns, copies, shared, shape)
                            specs.append(spec(made))
            specs.append(reduce_spec(epilogue, dtype))
        return list(dict.fromkeys(specs))


KERNELS = {code.name: SlicesKernels(code) for code in (U8, U4, U2)}


def variant(code: Code, problem: Problem, arch: str, multiprocessors: int) -> Variant:
    """The variant for a problem: the fewest columns that hold all, or 8; copies if they fit."""
    columns = next((n for n in COLUMNS if n >= problem.columns), COLUMNS[-1])
    rows, width = "u16" if problem.rows <= SHORT_ROWS else "u32", problem.fact("width")
    itemsize = DTYPES[problem.dtype].bytes
    copies, shared = next(
        (copies, shared)
        for copies, shared in _holdings(problem.dtype, columns, arch)
        if shared >= width * columns * itemsize * copies
    )
    panels, slices = grid((problem.rows, problem.cols), width)
    few = panels * slices <= FEW_SLICES * multiprocessors
    shape = shape_of(code, problem.dtype, columns, copies, few)
    return Variant(code, problem.dtype, rows, columns, copies, shared, shape)


def _holdings(dtype: str, columns: int, arch: str) -> list[tuple[int, int]]:
    """Copies of x and bytes for them, the best first; the last holds a panel of any width."""
    itemsize, found = DTYPES[dtype].bytes, []
    if itemsize == 2 and columns >= 4:
        limit = targets.SHARED_BYTES[arch] - COUNTER_BYTES
        copies = COPIED // (columns * itemsize)
        found = [(copies, shared) for shared in COPIES_SHARED if shared <= limit]
    return [*found, (1, SHARED[columns])]


def shape_of(code: Code, dtype: str, columns: int, copies: int, few: bool) -> Shape:
    """Blocks for a dtype, the columns of x that one takes, and whether there are few slices."""
    threads, blocks, codes = _read_ahead(DTYPES[dtype].bytes == 4, columns, copies, few)
    return Shape(threads, blocks, max(1, codes // code.whole))


def _read_ahead(wide: bool, columns: int, copies: int, few: bool) -> tuple[int, int, int]:
    """Threads, blocks, and codes that a lane reads ahead."""
    if copies > 1:
        return 512, 1, 32
    if wide and columns >= 4:
        return 256, 2, 16
    if few:
        return 256, 2, 32 if wide or columns > 2 else 64
    if wide and columns == 2:
        return 256, 2, 32
    return 512, 2, 16 if wide or columns == 8 else 32


def _ranges(panels: int, slices: int, blocks: int, copied: bool) -> int:
    """Blocks among which the slices of all panels are divided. Of x in copies a block holds one
    panel: one with parts of two takes twice the time, and with it the launch. So there each panel
    has as many blocks, unless that would leave too many multiprocessors idle: 8192 x 28672 at .3
    took 78 us instead of 88 with 8 vectors, and 57 instead of 77 with 4."""
    whole = blocks // panels * panels
    if copied and whole >= LEAST_BUSY * blocks:
        return min(panels * slices, whole)
    return min(panels * slices, blocks)


def held(made: Variant, width: int) -> int:
    """Panels of x that a block's shared memory holds: one at least."""
    return made.shared // (width * made.columns * DTYPES[made.dtype].bytes * made.copies)


def spec(made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    code, dtype, rows, columns, copies, shared, shape = made
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};
using RowT = {rows};

constexpr int STEP_BITS = {code.bits};
constexpr int COLUMNS = {columns};
constexpr int COPIES = {copies};
constexpr int THREADS = {shape.threads};
constexpr int BLOCKS = {shape.blocks};
constexpr int DEPTH = {shape.depth};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "sparse/slices/slices.cuh"
"""
    words = f"sparse {code.name} {dtype} {columns} columns x{copies} in {shared}, rows {rows}"
    words = f"{words}, {shape.threads} threads"
    shared += COUNTER_BYTES
    made = KernelSpec("sparse", source, "sparse_slices", shape.threads, shared, description=words)
    return named(made, code.name, dtype, f"vectors={columns}x{copies} {shape.threads} rows {rows}")


def reduce_spec(epilogue: tuple[Epilogue, ...], dtype: str) -> KernelSpec:
    """The KernelSpec that adds panels and applies epilogues."""
    size = text.parameters(2, REDUCE_FIXED, epilogue).size
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int PARAMETER_BYTES = {size};

#include "sparse/slices/reduce.cuh"
"""
    words = text.describe("sparse", "sum of panels", dtype, "fp32", [], epilogue)
    entry = "sparse_slices_reduce"
    made = KernelSpec("sparse", source, entry, REDUCE_THREADS, description=words)
    return named(made, dtype, epilogue=epilogue)


def _reduce(epilogue: tuple[Epilogue, ...], problem: Problem, arch: str) -> Step:
    panels, _ = grid((problem.rows, problem.cols), problem.fact("width"))
    strides, sizes = problem.out_strides, (panels, problem.rows, problem.columns, 0)
    fixed = struct.pack(REDUCE_FIXED, *strides, *sizes)
    pointers = (("workspace", 0), ("out", 0), *text.vector_pointers(epilogue))
    return Step(
        reduce_spec(epilogue, problem.dtype),
        (ceil_div(problem.rows, REDUCE_ROWS), problem.columns),
        fixed,
        pointers,
        text.scalar_count(epilogue),
        overlaps=arch in OVERLAPPING,
    )
