"""The product of a matrix in MACKO's format: macko/macko.cuh, and macko/sum.cuh behind it where
rows are too unequal, or too few, to be divided among CTAs whole."""

from __future__ import annotations

import struct
from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step

MOST_COLUMNS = 16
MOST_SIZE = 2**31 - 2**16  # of rows and columns
WIDE_FROM = 2**31  # entries from which row_ptr takes int64
BLOCK = 32  # rows whose entries ``busiest`` tells
MOST_ROWS = 512  # of a CTA that takes whole rows
TOGETHER = (8, 4, 2, 1)  # vectors that a CTA multiplies by
# KiB of a CTA's shared memory for one vector and for more, cut to what a block may have: what is
# left of a multiprocessor's is its cache.
TIERS, TIERS_TOGETHER = (64, 100, 164, 228), (100, 228)
# Entries that a CTA reads in the time that dividing rows costs: a launch more, 1.5 us.
ENTRIES_OF_A_LAUNCH = 16384
LOAD_OPTIONS = ".nc.L1::no_allocate"
FIXED = "<3q4i"
SUM_FIXED = "<3q2i"
POINTERS = 5
SUM_THREADS = 128


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue. ``shared`` bytes for
    ``columns`` vectors of x side by side, 0 to gather from device memory; ``ranges``, whether CTAs
    divide entries and not rows."""

    dtype: str
    wide: bool
    warps: int
    depth: int
    columns: int
    shared: int
    ranges: bool


def takes(problem: Problem, arch: str) -> bool:
    """Whether the kernel computes a problem: up to MOST_COLUMNS vectors."""
    sizes = problem.rows, problem.cols
    return (
        problem.dtype in FLOAT_SUMS
        and 0 < problem.columns <= MOST_COLUMNS
        and all(0 < size <= MOST_SIZE for size in sizes)
    )


def lower(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a call. Raises UnsupportedError where :func:`takes` says no."""
    if not takes(problem, arch):
        raise UnsupportedError(
            f"no kernel multiplies a {problem.rows} x {problem.cols} {problem.dtype} matrix in "
            f"MACKO's format by {problem.columns} vectors; MOST_COLUMNS is {MOST_COLUMNS}"
        )
    rows_of_cta = _rows_of_cta(problem, multiprocessors)
    ranges = _divides_entries(problem, rows_of_cta, multiprocessors)
    variant = variant_of(problem, arch, ranges)
    return launches(epilogue, problem, arch, variant, multiprocessors)


def launches(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    variant: Variant,
    multiprocessors: int,
) -> Lowered:
    """The launches of a call by a variant."""
    rows_of_cta = _rows_of_cta(problem, multiprocessors)
    ctas = multiprocessors if variant.ranges else ceil_div(problem.rows, rows_of_cta)
    fixed = struct.pack(
        FIXED, problem.x_stride, *problem.out_strides,
        problem.rows, problem.cols, problem.columns, rows_of_cta,
    )  # fmt: skip
    made = spec(() if variant.ranges else epilogue, variant, arch)
    grid = ctas, ceil_div(problem.columns, variant.columns)
    operands = tuple((name, 0) for name in ("values", "deltas", "row_ptr", "x"))
    if not variant.ranges:
        pointers = (*operands, ("out", 0), *text.vector_pointers(epilogue))
        main = Step(made, grid, fixed, pointers, text.scalar_count(epilogue))
        return Lowered((main,))
    main = Step(made, grid, fixed, (*operands, ("workspace", 0)))
    parts = ctas * variant.warps
    size = 4 * problem.columns * (problem.rows + parts)
    return Lowered((main, _sum_step(epilogue, problem, arch, variant.wide, parts)), size)


def variant_of(problem: Problem, arch: str, ranges: bool) -> Variant:
    """The variant for a problem: as many vectors at once as fit, of no more than there are."""
    itemsize = DTYPES[problem.dtype].bytes
    wide = problem.fact("entries") >= WIDE_FROM
    for columns in _together(problem.dtype, wide):
        if columns >= 2 * problem.columns:
            continue
        made = Variant(problem.dtype, wide, *_shape(problem.dtype, columns), columns, 0, ranges)
        needed = round_up(problem.cols, 8) * itemsize * columns
        for shared in _tiers(made, arch):
            if needed <= shared:
                return made._replace(shared=shared)
    return made


def _shape(dtype: str, columns: int) -> tuple[int, int]:
    """Warps of a CTA, and steps that each has in flight. Of a half type 24 warps took 53.5 us where
    16 with three steps took 67.9, 32 with one 54.1 (8192 x 28672, density .3, on an H200)."""
    return (16 if dtype == "float32" or columns > 1 else 24, 2)


def _together(dtype: str, wide: bool) -> tuple[int, ...]:
    """Vectors that a CTA may take: 16 bytes for a column of the matrix at most, and one of a matrix
    past 2^31 entries, for which others would be more kernels to build."""
    return (1,) if wide else tuple(n for n in TOGETHER if n * DTYPES[dtype].bytes <= 16)


def _tiers(variant: Variant, arch: str) -> list[int]:
    """Bytes of x that CTAs of an arch may hold."""
    limit = targets.SHARED_BYTES[arch]
    tiers = TIERS if variant.columns == 1 else TIERS_TOGETHER
    sizes = (min(1024 * tier, limit) - static_bytes(variant) for tier in tiers)
    return list(dict.fromkeys(size // 128 * 128 for size in sizes))


def static_bytes(variant: Variant) -> int:
    """Shared memory that the kernel declares: sums of rows and of rows begun before."""
    rows = 1 if variant.ranges else MOST_ROWS * variant.columns
    return 4 * (rows + variant.warps * (variant.columns + 1)) + 128


def _rows_of_cta(problem: Problem, multiprocessors: int) -> int:
    """Rows of a CTA: as many for each, in as few waves as their number permits."""
    waves = -(-problem.rows // (multiprocessors * MOST_ROWS))
    return -(-problem.rows // (multiprocessors * waves))


def _divides_entries(problem: Problem, rows_of_cta: int, multiprocessors: int) -> bool:
    """Whether whole rows would leave a CTA more entries than its share and those of the launch that
    comes with shares: as estimated from the longest row and the busiest ones side by side."""
    blocks = max(1, rows_of_cta / BLOCK)
    most = min(problem.fact("longest") * rows_of_cta, problem.fact("busiest") * blocks)
    return most > problem.fact("entries") / multiprocessors * 1.1 + ENTRIES_OF_A_LAUNCH


def spec(epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    size = text.parameters(POINTERS, FIXED, epilogue).size
    out = "float32" if variant.ranges else variant.dtype
    source = f"""{text.preamble(variant.dtype, out, epilogue)}
using RowT = {_row_type(variant.wide)};
constexpr int WARPS = {variant.warps};
constexpr int DEPTH = {variant.depth};
constexpr int COLUMNS = {variant.columns};
constexpr bool SHARED_X = {str(variant.shared > 0).lower()};
constexpr bool RANGES = {str(variant.ranges).lower()};
constexpr int MOST_ROWS = {MOST_ROWS};
constexpr int PARAMETER_BYTES = {size};
#define LOAD_OPTIONS "{LOAD_OPTIONS}"
#define DEPENDENTS {int(variant.ranges and arch in OVERLAPPING)}

#include "sparse/macko/macko.cuh"
"""
    words = [
        f"warps={variant.warps}",
        f"depth={variant.depth}",
        f"vectors={variant.columns}",
        f"shared={variant.shared}",
        *["ranges"] * variant.ranges,
        *["wide"] * variant.wide,
    ]
    description = " ".join(["sparse macko", variant.dtype, *words, *map(str, epilogue)])
    threads = 32 * variant.warps
    made = KernelSpec(
        "sparse", source, "sparse_macko", threads, variant.shared, description=description
    )
    return named(made, variant.dtype, *words, epilogue=epilogue)


def _sum_step(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, wide: bool, parts: int
) -> Step:
    """Adds up the parts of rows."""
    fixed = struct.pack(SUM_FIXED, *problem.out_strides, parts, problem.rows, problem.columns)
    grid = -(-problem.rows * 32 // SUM_THREADS), problem.columns
    pointers = (("row_ptr", 0), ("workspace", 0), ("out", 0), *text.vector_pointers(epilogue))
    made = sum_spec(epilogue, problem.dtype, wide, arch)
    scalars = text.scalar_count(epilogue)
    return Step(made, grid, fixed, pointers, scalars, overlaps=arch in OVERLAPPING)


def sum_spec(epilogue: tuple[Epilogue, ...], dtype: str, wide: bool, arch: str) -> KernelSpec:
    """The KernelSpec of what adds up parts of rows."""
    size = text.parameters(3, SUM_FIXED, epilogue).size
    source = f"""{text.preamble(dtype, dtype, epilogue)}
using RowT = {_row_type(wide)};
constexpr int PARAMETER_BYTES = {size};
#define OVERLAPS {int(arch in OVERLAPPING)}

#include "sparse/macko/sum.cuh"
"""
    words = ["sparse macko_sum", dtype, *["wide"] * wide, *map(str, epilogue)]
    made = KernelSpec(
        "sparse", source, "sparse_macko_sum", SUM_THREADS, description=" ".join(words)
    )
    return named(made, dtype, *["wide"] * wide, epilogue=epilogue)


def _row_type(wide: bool) -> str:
    return "i64" if wide else "int"


def variants(
    epilogue: tuple[Epilogue, ...], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose."""
    found = []
    for dtype in dtypes:
        for wide, ranges in product((False, True), (False, True)):
            for columns in _together(dtype, wide):
                made = Variant(dtype, wide, *_shape(dtype, columns), columns, 0, ranges)
                sizes = _tiers(made, arch) + [0] * (columns == 1)
                own = () if ranges else epilogue
                found += [spec(own, made._replace(shared=size), arch) for size in sizes]
        found += [sum_spec(epilogue, dtype, wide, arch) for wide in (False, True)]
    return list(dict.fromkeys(found))
