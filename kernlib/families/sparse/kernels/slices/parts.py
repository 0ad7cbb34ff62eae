"""The kernel slices/parts.cuh of kernel_sources/sparse: products with the formats u8, u4 and u2
where one panel has all columns and rows may be cut into parts. One launch is a product.

It begins before what came before it has ended, and waits for that. Of a frozen matrix it reads the
matrix, never x, before it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import SparseKernel
from kernlib.families.sparse.lowering.codes import (
    CODES,
    LANES,
    MOST_SIZE,
    ROW_TYPES,
    WIDEST_IN_PARTS,
    Code,
    row_type,
)
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered

COLUMNS = (8, 4, 2, 1)  # vectors that a block takes at a time
MOST_COLUMNS = 16  # that one call takes
FEW_COLUMNS, FEW_ROWS = 2, 8192  # of matrices of one panel for which one launch is faster
WARPS = 32  # of a multiprocessor with 64 registers a thread
FEW_WARPS = 16  # the same with 128, of which more hold codes that are on their way
BLOCK_WARPS = (8, 16, 32)
SMALL_SHARED = 32 * 1024


class Room(NamedTuple):
    """Bytes of shared memory that a block asks for, for sums and x, and how many blocks a
    multiprocessor holds then."""

    shared: int
    blocks: int


class Parts(SparseKernel):
    """Multiplies by all of x at a time, a part of a row a lane."""

    role = "product"
    name = "parts"
    header = "sparse/slices/parts.cuh"
    entry = "sparse_parts"
    reason = (
        "the same formats where one panel has all columns and vectors or slices are few, or "
        "rows are cut into parts"
    )
    operands = ("data", "offsets", "rows", "x", "out")
    fixed = Fields((
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
        """Everything that code generation chooses besides the epilogue."""

        code: Code
        dtype: str
        rows: str  # CUDA type of rows
        columns: int
        warps: int  # of a block
        few: bool  # warps of a multiprocessor, with more registers each
        room: Room

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem: of one panel, which shared memory holds."""
        width, itemsize = problem.fact("width"), DTYPES[problem.dtype].bytes
        if problem.dtype not in FLOAT_SUMS or not 1 <= problem.columns <= MOST_COLUMNS:
            return False
        fits = 0 < problem.cols <= width <= WIDEST_IN_PARTS // itemsize
        return fits and problem.rows <= MOST_SIZE

    def pays(self, problem: Problem, gpu: Gpu) -> bool:
        """Of rows that are cut, and of others those of few vectors, or few slices: copies of x pay
        for the rest."""
        few = problem.columns <= FEW_COLUMNS or problem.rows <= FEW_ROWS
        return few or parts_of(problem) > 1

    def launch(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        gpu: Gpu,
        choice: Mapping[str, Any],
    ) -> Lowered:
        """The launch of a problem; none where there are no rows."""
        if not problem.rows:
            return Lowered(())
        parts, slices = parts_of(problem), ceil_div(problem.rows, LANES)
        variant = variant_of(problem, *gpu)
        slots = _slots(variant.warps, parts, slices, gpu.multiprocessors)
        chunks = ceil_div(problem.columns, variant.columns)
        resident = max(1, gpu.multiprocessors * variant.room.blocks // chunks)
        blocks = min(ceil_div(slices, slots), resident)
        step = self.step_of(
            epilogue,
            problem,
            variant,
            gpu.arch,
            (blocks * chunks, 1),
            slices=slices,
            row_pitch=LANES * (1 + parts if parts > 1 else 1),
            parts=parts,
            slots=slots,
            step=blocks * slots,
            chunks=chunks,
            ahead=int(problem.frozen and gpu.arch in OVERLAPPING),
        )
        return Lowered((step,))

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of a format."""
        blocks = (1, 2, 4)
        rooms = (_rooms(scope.arch, columns, n) for columns in COLUMNS for n in blocks)
        return {
            "code": (CODES[scope.format],),
            "dtype": scope.dtypes,
            "rows": ROW_TYPES,
            "columns": COLUMNS,
            "warps": BLOCK_WARPS,
            "few": (False, True),
            "room": dict.fromkeys(chain.from_iterable(rooms)),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether blocks have such room; those that need many registers are few, and of others
        those of short rows alone may be."""
        needs_few = _needs_few(DTYPES[variant.dtype].bytes, variant.columns, scope.arch)
        if needs_few and (not variant.few or variant.warps > FEW_WARPS):
            return False
        if variant.few and not needs_few and variant.rows != ROW_TYPES[0]:
            return False
        blocks, _ = _shape(variant, scope.arch)
        return variant.room in _rooms(scope.arch, variant.columns, blocks)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        code, dtype, rows, columns, warps, _, (shared, blocks) = variant
        threads, (_, depth) = 32 * warps, _shape(variant, arch)
        facts = {
            **text.facts(dtype, dtype, epilogue),
            "RowT": rows,
            "STEP_BITS": code.bits,
            "COLUMNS": columns,
            "COPIES": 1,
            "THREADS": threads,
            "BLOCKS": blocks,
            "DEPTH": depth,
        }
        words = [f"vectors={columns} {threads}x{blocks}x{depth}", f"rows {rows}"]
        return self.spec_of(epilogue, facts, threads, shared, f"{code.name} {dtype}", words)


def parts_of(problem: Problem) -> int:
    """Into how many parts rows are cut."""
    return dict(problem.facts).get("parts", 1)


def variant_of(problem: Problem, arch: str, multiprocessors: int) -> Parts.Variant:
    """The variant for a problem: for all vectors at a time, if shared memory holds them."""
    parts, rows = parts_of(problem), row_type(problem.rows)
    itemsize, limit = DTYPES[problem.dtype].bytes, targets.SHARED_BYTES[arch]
    slices, code = ceil_div(problem.rows, LANES), CODES[problem.format]
    # Codes that fill up parts lead a little beyond the last column; nothing is read for them.
    wide = round_up(problem.cols, LANES) + 4 * parts
    for columns in COLUMNS:
        needs_few = _needs_few(itemsize, columns, arch)
        if (columns > 1 and columns // 2 >= problem.columns) or (needs_few and parts > FEW_WARPS):
            continue
        few = needs_few or (rows == ROW_TYPES[0] and parts * slices <= FEW_WARPS * multiprocessors)
        most = FEW_WARPS if needs_few else WARPS
        warps = _warps(parts, slices, FEW_WARPS if few else WARPS, most, multiprocessors)
        shape = Parts.Variant(code, problem.dtype, rows, columns, warps, few, Room(0, 0))
        needed = wide * columns * itemsize + 32 * warps * columns * 4
        for room in _rooms(arch, columns, _shape(shape, arch)[0]):
            if needed <= room.shared:
                return shape._replace(room=room)
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


def _shape(variant: Parts.Variant, arch: str) -> tuple[int, int]:
    """Blocks of a multiprocessor, and groups that are read ahead."""
    wide, columns, warps = DTYPES[variant.dtype].bytes == 4, variant.columns, variant.warps
    if variant.few and warps < WARPS:
        codes = 16 if wide and columns >= 4 else 32 if wide or columns > 2 else 64
        return FEW_WARPS // warps, max(1, codes // variant.code.group)
    codes = 16 if wide else 24 if columns == 4 and variant.code.bits == 4 else 32
    if arch.startswith("sm_1"):
        codes = 8 if wide else 16
    return WARPS // warps, max(1, codes // variant.code.group)


def _rooms(arch: str, columns: int, blocks: int) -> list[Room]:
    """What a block may ask for: little, the share of each of ``blocks``, and all."""
    reserved = targets.RESERVED_SHARED_BYTES
    limit = targets.SHARED_BYTES[arch] + reserved
    sizes = {SMALL_SHARED: blocks} if columns <= 2 and blocks * SMALL_SHARED < limit else {}
    sizes |= {limit // blocks - reserved: blocks, limit - reserved: 1}
    return [Room(*size) for size in sizes.items()]
