"""The product of a matrix in MACKO's format: macko/macko.cuh, and macko/sum.cuh behind it where
rows are too unequal, or too few, to be divided among CTAs whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import PartialSums, SparseKernel
from kernlib.families.sparse.lowering.problem import OVERLAPPING, POINTER_TYPES, Problem, Scope
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

MOST_COLUMNS = 16
MOST_SIZE = 2**31 - 2**16  # of rows and columns
WIDE_FROM = 2**31  # entries from which row_ptr takes int64
BLOCK = 32  # rows whose entries ``busiest`` tells
MOST_ROWS = 512  # of a CTA that takes whole rows
TOGETHER = (8, 4, 2, 1)  # vectors that a CTA multiplies by
DEPTH = 2  # steps that each warp has in flight
# KiB of a CTA's shared memory for one vector and for more, cut to what a block may have: what is
# left of a multiprocessor's is its cache.
TIERS, TIERS_TOGETHER = (64, 100, 164, 228), (100, 228)
# Entries that a CTA reads in the time that dividing rows costs: a launch more, 1.5 us.
ENTRIES_OF_A_LAUNCH = 16384


class MackoSum(PartialSums):
    """Adds up the parts of rows."""

    name = "macko sum"
    header = "sparse/macko/sum.cuh"
    entry = "sparse_macko_sum"
    reason = "parts of rows of `macko`, added up in one order"
    operands = ("row_ptr", WORKSPACE, "out")
    fixed = Fields((
        "i64 out_vector_stride", "i64 out_row_stride", "i64 parts", "int rows", "int columns",
    ))  # fmt: skip
    threads = 128

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        wide: bool

    def step(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, wide: bool, parts: int
    ) -> Step:
        """The launch behind one whose CTAs divide entries into ``parts``."""
        variant = self.Variant(problem.dtype, wide)
        blocks = ceil_div(problem.rows * 32, self.threads), problem.columns
        return self.step_of(epilogue, problem, variant, arch, blocks, parts=parts)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of the dtypes of a scope."""
        return {"dtype": scope.dtypes, "wide": (False, True)}

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """The type of row_ptr."""
        return {"RowT": POINTER_TYPES[variant.wide]}

    def words(self, variant: Variant) -> list[str]:
        """Whether row_ptr is wide."""
        return ["wide"] * variant.wide


class Macko(SparseKernel):
    """Gathers x for each entry; CTAs divide rows, or entries."""

    role = "product"
    name = "macko"
    header = "sparse/macko/macko.cuh"
    entry = "sparse_macko"
    reason = "the matrix's format decides: `macko`, of up to 16 vectors"
    operands = ("values", "deltas", "row_ptr", "x", "out")  # or the workspace in place of the last
    fixed = Fields((
        "i64 x_stride", "i64 out_vector_stride", "i64 out_row_stride",
        "int rows", "int cols", "int columns", "int rows_of_cta",
    ))  # fmt: skip
    steps = (MackoSum,)

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue. ``shared`` bytes for
        ``columns`` vectors of x side by side, 0 to gather from device memory; ``ranges``, whether
        CTAs divide entries and not rows."""

        dtype: str
        wide: bool
        columns: int
        shared: int
        ranges: bool

        @property
        def warps(self) -> int:
            """Of a CTA. Of a half type 24 took 53.5 us where 16 with three steps in flight took
            67.9, 32 with one 54.1 (8192 x 28672, density .3, on an H200)."""
            return 16 if self.dtype == "float32" or self.columns > 1 else 24

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem: up to MOST_COLUMNS vectors."""
        sizes = problem.rows, problem.cols
        return (
            problem.dtype in FLOAT_SUMS
            and 0 < problem.columns <= MOST_COLUMNS
            and all(0 < size <= MOST_SIZE for size in sizes)
        )

    def launch(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        gpu: Gpu,
        choice: Mapping[str, Any],
    ) -> Lowered:
        """The launches of a problem."""
        ranges = _divides_entries(problem, gpu.multiprocessors)
        return self.launches(epilogue, problem, gpu, variant_of(problem, gpu.arch, ranges))

    def launches(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, variant: Variant
    ) -> Lowered:
        """The launches of a problem by a variant."""
        rows_of_cta = _rows_of_cta(problem, gpu.multiprocessors)
        ctas = gpu.multiprocessors if variant.ranges else ceil_div(problem.rows, rows_of_cta)
        main = self.step_of(
            () if variant.ranges else epilogue,
            problem,
            variant,
            gpu.arch,
            (ctas, ceil_div(problem.columns, variant.columns)),
            overlaps=False,
            rows_of_cta=rows_of_cta,
        )
        if not variant.ranges:
            return Lowered((main,))
        parts, sums = ctas * variant.warps, main.placed({"out": (WORKSPACE, 0)})
        last = MackoSum().step(epilogue, problem, gpu.arch, variant.wide, parts)
        return Lowered((sums, last), 4 * problem.columns * (problem.rows + parts))

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of the dtypes of a scope."""
        tiers = {
            size: None
            for dtype in scope.dtypes
            for columns in _together(dtype, False)
            for ranges in (False, True)
            for size in _tiers(self.Variant(dtype, False, columns, 0, ranges), scope.arch)
        }
        return {
            "dtype": scope.dtypes,
            "wide": (False, True),
            "columns": TOGETHER,
            "shared": (*tiers, 0),
            "ranges": (False, True),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether CTAs take so many vectors, and hold x so."""
        if variant.columns not in _together(variant.dtype, variant.wide):
            return False
        is_tier = variant.shared in _tiers(variant, scope.arch)
        return is_tier or (not variant.shared and variant.columns == 1)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant, without the epilogue where the result is parts."""
        dtype, wide, columns, shared, ranges = variant
        epilogue = () if ranges else epilogue
        facts = {
            **text.facts(dtype, "float32" if ranges else dtype, epilogue),
            "RowT": POINTER_TYPES[wide],
            "WARPS": variant.warps,
            "DEPTH": DEPTH,
            "COLUMNS": columns,
            "SHARED_X": shared > 0,
            "RANGES": ranges,
            "MOST_ROWS": MOST_ROWS,
            "DEPENDENTS": ranges and arch in OVERLAPPING,
        }
        words = [f"warps={variant.warps}", f"depth={DEPTH}", f"vectors={columns}"]
        words += [f"shared={shared}", *["ranges"] * ranges, *["wide"] * wide]
        return self.spec_of(epilogue, facts, 32 * variant.warps, shared, dtype, words)


def variant_of(problem: Problem, arch: str, ranges: bool) -> Macko.Variant:
    """The variant for a problem: as many vectors at once as fit, of no more than there are."""
    itemsize = DTYPES[problem.dtype].bytes
    wide = problem.fact("entries") >= WIDE_FROM
    for columns in _together(problem.dtype, wide):
        if columns >= 2 * problem.columns:
            continue
        variant = Macko.Variant(problem.dtype, wide, columns, 0, ranges)
        needed = round_up(problem.cols, 8) * itemsize * columns
        for shared in _tiers(variant, arch):
            if needed <= shared:
                return variant._replace(shared=shared)
    return variant


def _together(dtype: str, wide: bool) -> tuple[int, ...]:
    """Vectors that a CTA may take: 16 bytes for a column of the matrix at most, and one of a matrix
    past 2^31 entries, for which others would be more kernels to build."""
    return (1,) if wide else tuple(n for n in TOGETHER if n * DTYPES[dtype].bytes <= 16)


def _tiers(variant: Macko.Variant, arch: str) -> list[int]:
    """Bytes of x that CTAs of an arch may hold."""
    limit = targets.SHARED_BYTES[arch]
    tiers = TIERS if variant.columns == 1 else TIERS_TOGETHER
    sizes = (min(1024 * tier, limit) - static_bytes(variant) for tier in tiers)
    return list(dict.fromkeys(size // 128 * 128 for size in sizes))


def static_bytes(variant: Macko.Variant) -> int:
    """Shared memory that the kernel declares: sums of rows and of rows begun before."""
    rows = 1 if variant.ranges else MOST_ROWS * variant.columns
    return 4 * (rows + variant.warps * (variant.columns + 1)) + 128


def _rows_of_cta(problem: Problem, multiprocessors: int) -> int:
    """Rows of a CTA: as many for each, in as few waves as their number permits."""
    waves = ceil_div(problem.rows, multiprocessors * MOST_ROWS)
    return ceil_div(problem.rows, multiprocessors * waves)


def _divides_entries(problem: Problem, multiprocessors: int) -> bool:
    """Whether whole rows would leave a CTA more entries than its share and those of the launch that
    comes with shares: as estimated from the longest row and the busiest ones side by side."""
    rows_of_cta = _rows_of_cta(problem, multiprocessors)
    blocks = max(1, rows_of_cta / BLOCK)
    most = min(problem.fact("longest") * rows_of_cta, problem.fact("busiest") * blocks)
    return most > problem.fact("entries") / multiprocessors * 1.1 + ENTRIES_OF_A_LAUNCH
