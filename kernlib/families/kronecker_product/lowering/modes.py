"""The kernel modes.cuh: one run of factors in one pass over memory."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.runs import Run
from kernlib.families.kronecker_product.lowering.variant import (
    GRID_BATCH,
    LINE,
    MOST_WARPS,
    SUMS,
    Part,
    Variant,
    matrix_numbers,
    parameters,
    run_numbers,
    spec,
    summand_numbers,
    warps_of,
)
from kernlib.jit import targets
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import Step

TILE_BYTES = 32 * 1024  # of a tile, if a column is not longer
WIDEST_TILE = 128  # columns
SECTOR = 8  # columns that lie side by side in 32 bytes of float32
LEAST_AHEAD = 4  # of a tile the part that is worth being read ahead


def most_features(dtype: str) -> int:
    """The longest column that a tile can be of: its results wait in registers."""
    return SUMS[DTYPES[dtype].accumulator] * MOST_WARPS * 32


def room(dtype: str, arch: str) -> int:
    """Elements of shared memory of a block."""
    return targets.SHARED_BYTES[arch] // DTYPES[dtype].sums.bytes - LINE


def most_columns(
    sizes: tuple[Size, ...],
    inside: bool,
    dtype: str,
    precision: str,
    arch: str,
    others: int = 0,
) -> int:
    """The widest tile of a run of factors, in columns: a power of two. ``others`` are elements of
    shared memory that other things take."""
    widest = grouping.widest(sizes)
    matrices = others + grouping.matrices(sizes, grouping.arithmetic_of(dtype, precision))
    most = min(most_features(dtype), room(dtype, arch) - matrices) // widest
    elements = TILE_BYTES // DTYPES[dtype].sums.bytes
    wanted = max(elements // widest, SECTOR if inside else 1)
    return _power(max(1, min(wanted, WIDEST_TILE, most)))


def columns_of(run: Run, dtype: str, precision: str, arch: str, multiprocessors: int) -> int:
    """The columns of a launch's tiles: so few that each multiprocessor has two tiles, but whole
    sectors of 32 bytes."""
    count = run.batch * run.outer * run.inner * run.columns
    shared = max(ceil_div(count, 2 * multiprocessors), SECTOR if run.inside else 1)
    most = most_columns(run.sizes, run.inside, dtype, precision, arch)
    return _power(min(most, run.columns, shared))


def _power(count: int) -> int:
    """The largest power of two up to a count."""
    return 1 << (count.bit_length() - 1)


def variant(
    sizes: tuple[Size, ...],
    dtypes: tuple[str, str, str],
    precision: str,
    inside: bool,
    columns: int,
    arch: str,
) -> Variant:
    """The kernel of a launch, for x, factors and result of these dtypes, and tiles of so many
    columns."""
    source, dtype, target = dtypes
    part = Part(source, target, columns, inside, sizes)
    warps = warps_of(dtype, columns * grouping.widest(sizes))
    made = Variant(dtype, precision, (part,), warps)
    return made._replace(ahead=ahead_of(made, arch))


def ahead_of(made: Variant, arch: str) -> int:
    """The elements of shared memory for what is read ahead: of float32 and float64 only, which go
    there without passing a register."""
    if made.resident(arch) > 1 or made.parts[0].source != DTYPES[made.dtype].accumulator:
        return 0
    free = (targets.SHARED_BYTES[arch] - made.shared_bytes) // made.itemsize // LINE * LINE
    ahead = min(free, made.tile)
    return ahead if ahead * LEAST_AHEAD >= made.tile else 0


def step(
    epilogue: tuple[Epilogue, ...],
    run: Run,
    made: Variant,
    arch: str,
    multiprocessors: int,
    operands: tuple[tuple[str, int], ...],
) -> Step:
    """The launch of a run. ``operands`` are the pointers of x, result and factors."""
    kernel, (part,) = spec(epilogue, made, arch), made.parts
    layout = parameters(1, len(run.factors), epilogue)
    numbers = run_numbers(run, part, (run.outer, run.columns), ((0, 0), (0, 0)))
    tiles = run.outer * run.inner * ceil_div(run.columns, part.columns)
    numbers += [*matrix_numbers([run]), run.batch, 1, tiles, 0]
    fixed = layout.pack(*numbers, *summand_numbers(run, [0] * len(run.summands)))
    blocks = min(tiles, max(1, made.resident(arch)) * multiprocessors)
    pointers = (*operands, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue))
    grid = blocks, min(run.batch, GRID_BATCH)
    return Step(kernel, grid, fixed, pointers, text.scalar_count(epilogue))
