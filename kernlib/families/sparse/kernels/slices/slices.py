"""The kernel slices/slices.cuh of kernel_sources/sparse: products with the formats u8, u4 and u2.

It adds up each row's products in each panel of columns; slices/reduce.cuh behind it adds panels, in
order, and applies epilogues: so the result does not depend on the order in which blocks run, and
there is no counter to reset. Both begin before what came before them has ended, and wait for that.
Of a frozen matrix the first reads the matrix, never x, before it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import SparseKernel
from kernlib.families.sparse.kernels.slices.reduce import Reduce
from kernlib.families.sparse.lowering.codes import (
    CODES,
    MOST_SIZE,
    ROW_TYPES,
    WIDEST,
    Code,
    grid,
    row_type,
)
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered

MOST_COLUMNS = 16  # columns of x that one call takes
COLUMNS = (1, 2, 4, 8)  # that a block takes at a time
COUNTER_BYTES = 16  # of shared memory, before x
COPIED = 128  # bytes of a column of x that lies in copies
# Bytes of x that a block holds, by COLUMNS: several panels of one vector, one of 8 at the least.
SHARED = {1: 24 * 1024, 2: 40 * 1024, 4: 40 * 1024, 8: 40 * 1024}
COPIES_SHARED = (64 * 1024, 224 * 1024)  # of a panel of 512 columns, of 1792
MOST_SLICES = 2**31 - 2**16  # that an unsigned index and its next steps hold
LEAST_BUSY = 0.8  # part of all blocks that panels with blocks of their own must leave
FEW_SLICES = 16  # of a multiprocessor, up to which half its warps do


class Holding(NamedTuple):
    """Copies of x that a block's shared memory holds, and its bytes for them."""

    copies: int
    shared: int


class Slices(SparseKernel):
    """Multiplies panel by panel, a row a lane."""

    role = "product"
    name = "slices"
    header = "sparse/slices/slices.cuh"
    entry = "sparse_slices"
    rank = 1
    reason = "the matrix's format decides: `u8`, `u4` or `u2`, by panels of columns"
    operands = ("data", "offsets", "rows", "x", WORKSPACE)
    fixed = Fields((
        "i64 x_stride",
        "u32 slices", "u32 panel_slices",  # in all, and of a panel
        "u32 width", "u32 rows_count", "u32 cols", "u32 columns",
        "u32 chunks",  # of COLUMNS vectors
        "u32 ranges",  # of slices, one for each block of a chunk
        "u32 held",    # panels of x that shared memory holds
        "u32 ahead",   # whether the matrix may be read before prerequisites have ended
    ))  # fmt: skip
    finishes = False
    includes = ()
    steps = (Reduce,)

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        code: Code
        dtype: str
        rows: str  # CUDA type of rows
        columns: int
        holding: Holding
        few: bool  # slices

        @property
        def shape(self) -> tuple[int, int, int]:
            """Threads of a block, blocks of a multiprocessor, and groups of codes read ahead, for a
            dtype, the columns of x that a block takes, and few slices or many."""
            wide, columns = DTYPES[self.dtype].bytes == 4, self.columns
            threads, blocks, codes = _read_ahead(wide, columns, self.holding.copies, self.few)
            return threads, blocks, max(1, codes // self.code.group)

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem: all of 1 to MOST_COLUMNS columns that can be
        counted, of panels that shared memory holds."""
        width, sizes = problem.fact("width"), (problem.rows, problem.cols)
        if problem.dtype not in FLOAT_SUMS or max(sizes) > MOST_SIZE:
            return False
        if not 0 < width <= WIDEST // DTYPES[problem.dtype].bytes:
            return False
        panels, slices = grid(sizes, width)
        return 1 <= problem.columns <= MOST_COLUMNS and panels * slices < MOST_SLICES

    def launch(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        gpu: Gpu,
        choice: Mapping[str, Any],
    ) -> Lowered:
        """The launches of a problem; the second alone where there are no columns, none where there
        are no rows."""
        if not problem.rows:
            return Lowered(())
        last, width = Reduce().step(epilogue, problem, gpu.arch), problem.fact("width")
        panels, slices = grid((problem.rows, problem.cols), width)
        if not panels:
            return Lowered((last,), 16)
        variant = variant_of(problem, *gpu)
        chunks, (_, resident, _) = ceil_div(problem.columns, variant.columns), variant.shape
        blocks = max(1, gpu.multiprocessors * resident // chunks)
        ranges = _ranges(panels, slices, blocks, variant.holding.copies > 1)
        first = self.step_of(
            (),
            problem,
            variant,
            gpu.arch,
            (ranges * chunks, 1),
            slices=panels * slices,
            panel_slices=slices,
            width=width,
            chunks=chunks,
            ranges=ranges,
            held=panels_in_shared(variant, width),
            ahead=int(problem.frozen and gpu.arch in OVERLAPPING),
        )
        return Lowered((first, last), 4 * panels * problem.columns * problem.rows)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of a format."""
        holdings = (_holdings(d, n, scope.arch) for d in scope.dtypes for n in COLUMNS)
        return {
            "code": (CODES[scope.format],),
            "dtype": scope.dtypes,
            "rows": ROW_TYPES,
            "columns": COLUMNS,
            "holding": dict.fromkeys(chain.from_iterable(holdings)),
            "few": (False, True),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether blocks hold x so."""
        return variant.holding in _holdings(variant.dtype, variant.columns, scope.arch)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant, which applies no epilogue."""
        code, dtype, rows, columns, holding, _ = variant
        threads, blocks, depth = variant.shape
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "RowT": rows,
            "STEP_BITS": code.bits,
            "COLUMNS": columns,
            "COPIES": holding.copies,
            "THREADS": threads,
            "BLOCKS": blocks,
            "DEPTH": depth,
        }
        words = [f"vectors={columns}x{holding.copies}", str(threads), f"rows {rows}"]
        shared = holding.shared + COUNTER_BYTES
        return self.spec_of((), facts, threads, shared, f"{code.name} {dtype}", words)


def variant_of(problem: Problem, arch: str, multiprocessors: int) -> Slices.Variant:
    """The variant for a problem: the fewest columns that hold all, or 8; copies if they fit."""
    columns = next((n for n in COLUMNS if n >= problem.columns), COLUMNS[-1])
    rows, width = row_type(problem.rows), problem.fact("width")
    size = width * columns * DTYPES[problem.dtype].bytes
    holdings = _holdings(problem.dtype, columns, arch)
    holding = next(holding for holding in holdings if holding.shared >= size * holding.copies)
    panels, slices = grid((problem.rows, problem.cols), width)
    few = panels * slices <= FEW_SLICES * multiprocessors
    code = CODES[problem.format]
    return Slices.Variant(code, problem.dtype, rows, columns, holding, few)


def _holdings(dtype: str, columns: int, arch: str) -> list[Holding]:
    """How blocks may hold x, the best first; the last holds a panel of any width."""
    itemsize, copied = DTYPES[dtype].bytes, []
    if itemsize == 2 and columns >= 4:
        limit = targets.SHARED_BYTES[arch] - COUNTER_BYTES
        copies = COPIED // (columns * itemsize)
        copied = [Holding(copies, shared) for shared in COPIES_SHARED if shared <= limit]
    return [*copied, Holding(1, SHARED[columns])]


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
    even = blocks // panels * panels
    if copied and even >= LEAST_BUSY * blocks:
        return min(panels * slices, even)
    return min(panels * slices, blocks)


def panels_in_shared(variant: Slices.Variant, width: int) -> int:
    """Panels of x that a block's shared memory holds: one at least."""
    of_panel = width * variant.columns * DTYPES[variant.dtype].bytes * variant.holding.copies
    return variant.holding.shared // of_panel
