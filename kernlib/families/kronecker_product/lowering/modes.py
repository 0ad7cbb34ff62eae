"""The kernel modes.cuh: a run of factors applied to tiles that stay in shared memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Mode, Size
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.steps import Step

KIND = "modes"
LINE = 32  # elements: what a tile's size is a multiple of
TILE_ELEMENTS = 8192  # of a tile, if a column is not longer
WIDEST_TILE = 128  # columns
SECTOR = 8  # columns that lie side by side in 32 bytes of float32
MOST_WARPS = 16
SUMS = {"float32": 64, "float64": 32}  # registers of a thread for results, in elements
MAX_BATCH = 65535  # of a grid's second axis


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue: dtypes of x, of the factors and
    of the result, the tile's columns and warps, and sizes of the factors."""

    source: str
    dtype: str
    result: str
    precision: str
    columns: int
    inside: bool
    warps: int
    sizes: tuple[Size, ...]

    @property
    def modes(self) -> tuple[Mode, ...]:
        return grouping.modes(self.sizes, self.columns, self.inside)

    @property
    def tile(self) -> int:
        """Elements of shared memory that the tile takes."""
        return round_up(max(mode.inputs for mode in self.modes), LINE)


class Run(NamedTuple):
    """One launch: columns of ``outer`` indices, and which output feature each result is, as strides
    of outer index, column and feature, of a column divided by ``divisor`` first."""

    batch: int
    outer: int
    columns: int
    inside: bool
    factors: tuple[Factor, ...]
    x: Layout
    out: Layout
    feature: tuple[int, int, int]
    divisor: int


def most_features(dtype: str) -> int:
    """The longest column that a tile can be of: its results wait in registers."""
    return SUMS[DTYPES[dtype].accumulator] * MOST_WARPS * 32


def room(dtype: str, arch: str) -> int:
    """Elements of shared memory of a block."""
    return targets.SHARED_BYTES[arch] // DTYPES[dtype].sums.bytes - LINE


def most_columns(sizes: tuple[Size, ...], inside: bool, dtype: str, arch: str) -> int:
    """The widest tile of a run of factors, in columns: a power of two."""
    widest, matrices = grouping.widest(sizes), grouping.matrices(sizes)
    most = min(most_features(dtype), room(dtype, arch) - matrices) // widest
    wanted = max(TILE_ELEMENTS // widest, SECTOR if inside else 1)
    return _power(max(1, min(wanted, WIDEST_TILE, most)))


def columns_of(run: Run, dtype: str, arch: str, multiprocessors: int) -> int:
    """The columns of a launch's tiles: so few that each multiprocessor has two tiles, but whole
    sectors of 32 bytes."""
    shared = ceil_div(run.batch * run.outer * run.columns, 2 * multiprocessors)
    shared = max(shared, SECTOR if run.inside else 1)
    most = most_columns(sizes_of(run), run.inside, dtype, arch)
    return _power(min(most, run.columns, shared))


def sizes_of(run: Run) -> tuple[Size, ...]:
    """Rows and columns of a launch's factors."""
    return tuple((factor.rows, factor.columns) for factor in run.factors)


def variant(
    sizes: tuple[Size, ...],
    dtypes: tuple[str, str, str],
    precision: str,
    inside: bool,
    columns: int,
) -> Variant:
    """The kernel of a launch, for x, factors and result of these dtypes, and tiles of so many
    columns."""
    limit = SUMS[DTYPES[dtypes[1]].accumulator]
    warps = 4
    while warps < MOST_WARPS and warps * 32 * limit // 2 < columns * grouping.widest(sizes):
        warps *= 2
    return Variant(*dtypes, precision, columns, inside, warps, sizes)


def _power(count: int) -> int:
    """The largest power of two up to a count."""
    return 1 << (count.bit_length() - 1)


def spec(epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant. Raises UnsupportedError where its shared memory does not fit."""
    itemsize = DTYPES[variant.dtype].sums.bytes
    shared = itemsize * (variant.tile + sum(mode.matrix for mode in variant.modes))
    words = ["x".join(map(str, size)) for size in variant.sizes]
    words += [f"{variant.columns}c" + "i" * variant.inside, f"{variant.warps}w"]
    if (variant.source, variant.result) != (variant.dtype, variant.dtype):
        words += [variant.source, variant.result]
    description = text.describe(
        "kronecker_product", KIND, variant.dtype, variant.precision, words, epilogue
    )
    if shared > targets.SHARED_BYTES[arch]:
        raise UnsupportedError(
            f"{description} needs {shared} bytes of shared memory, a block of {arch} has "
            f"{targets.SHARED_BYTES[arch]}"
        )
    blocks = targets.resident_blocks(arch, 32 * variant.warps, 96, shared)
    source = _source(epilogue, variant, max(1, min(blocks, 4)))
    entry = "kronecker_product_modes"
    made = KernelSpec(
        "kronecker_product", source, entry, 32 * variant.warps, shared, description=description
    )
    precision = [variant.precision] * (variant.dtype == "float32")
    return named(made, variant.dtype, *precision, *words[-4:], epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, blocks: int) -> str:
    """The generated CUDA text: types, ``Finish``, constants, one include."""
    exact = variant.dtype == "float32" and variant.precision == "fp32"
    found, at, lines = variant.modes, 0, []
    for index, mode in enumerate(found):
        last = str(index == len(found) - 1).lower()
        lines.append(f"    with({', '.join(map(str, mode))}, {last}, {at})")
        at += mode.matrix
    rows, widths = (", ".join(str(size[side]) for size in variant.sizes) for side in (0, 1))
    double = "#define DOUBLE\n" * (variant.dtype == "float64")
    return f"""{text.preamble(variant.dtype, variant.result, epilogue)}
using SourceT = {DTYPES[variant.source].cuda};
{double}constexpr int PRODUCTS = {3 if exact else 1};
constexpr int WARPS = {variant.warps};
constexpr int MIN_BLOCKS = {blocks};
constexpr int COLUMNS = {variant.columns};
constexpr bool COLUMNS_LAST = {str(variant.inside).lower()};
constexpr int IN_FEATURES = {math.prod(size[0] for size in variant.sizes)};
constexpr int TILE = {variant.tile};
constexpr int FACTORS = {len(variant.sizes)};
__device__ constexpr int ROWS[] = {{{rows}}};
__device__ constexpr int WIDTHS[] = {{{widths}}};
constexpr int PARAMETER_BYTES = {parameters(len(variant.sizes), epilogue).size};

#define MODES(with) \\
{chr(10).join(line + " " + chr(92) for line in lines[:-1])}{chr(10) * (len(lines) > 1)}{lines[-1]}

#include "kronecker_product/modes/modes.cuh"
"""


def parameters(factors: int, epilogue: tuple[Epilogue, ...]) -> text.Parameters:
    """The parameter struct of a launch."""
    return text.parameters(2 + factors, f"<8q{3 * factors}q7q2I", epilogue)


def step(
    epilogue: tuple[Epilogue, ...],
    run: Run,
    made: Variant,
    arch: str,
    multiprocessors: int,
    operands: tuple[tuple[str, int], ...],
) -> Step:
    """The launch of a run. ``operands`` are the pointers of x, result and factors."""
    kernel = spec(epilogue, made, arch)
    across = ceil_div(run.columns, made.columns)
    tiles = run.outer * across
    if run.batch > MAX_BATCH:
        raise UnsupportedError(
            f"a batch of {run.batch} is more than one launch holds ({MAX_BATCH}); call it on slices"
        )
    strides = [s for f in run.factors for s in (f.row_stride, f.column_stride, f.batch_stride)]
    layout = parameters(len(run.factors), epilogue)
    fixed = layout.pack(
        *run.x[:4], *run.out[:4], *strides, run.columns, tiles, across, *run.feature, run.divisor,
        _vectors(run, made), int(run.x.column < run.x.feature),
    )  # fmt: skip
    blocks = targets.resident_blocks(arch, kernel.threads, 96, kernel.shared_bytes)
    grid = min(tiles, max(1, blocks) * multiprocessors), run.batch
    pointers = (*operands, *text.vector_pointers(epilogue))
    return Step(kernel, grid, fixed, pointers, text.scalar_count(epilogue))


def _vectors(run: Run, made: Variant) -> int:
    """Whether x takes aligned 16-byte copies along the tile's last dimension."""
    chunk = 16 // DTYPES[made.source].bytes
    x = run.x
    along, across = (x.column, x.feature) if run.inside else (x.feature, x.column)
    others = [across]
    others += [x.outer] * (run.outer > 1) + [x.batch] * (run.batch > 1)
    return int(along == 1 and not any(s % chunk for s in others) and x.alignment % 16 == 0)
