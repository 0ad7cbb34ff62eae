"""The kernel halves.cuh: all factors in one pass over memory, float16 and bfloat16 between them."""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Mode, Size
from kernlib.families.kronecker_product.lowering.runs import Run
from kernlib.families.kronecker_product.lowering.variant import (
    GRID_BATCH,
    Part,
    matrix_numbers,
    parameters,
    run_numbers,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.steps import Step

KIND = "halves"
CHUNK = 8  # numbers of 16 bytes, which tensor cores and copies take
LINE = 64  # numbers: what a tile's size is a multiple of
IN_PLACE_MOST = 128  # columns of a matrix that one warp keeps sums of
TILE_ELEMENTS = 16384  # of a tile, if a column is not longer
WIDEST_TILE = 64  # columns
# Of a thread, as resident blocks are counted: for matrices of up to SMALL columns, and above.
REGISTERS, REGISTERS_LARGE, SMALL = 80, 128, 16
LEAST_AHEAD = 4  # of a tile the part that is worth being read ahead


class Halves(NamedTuple):
    """Everything that code generation chooses besides the epilogue: the dtype, the tile's columns
    and whether they are its last dimension, sizes of the factors, the block's warps, and elements
    behind a tile for what is read of the next."""

    dtype: str
    columns: int
    inside: bool
    sizes: tuple[Size, ...]
    warps: int
    ahead: int = 0

    @property
    def modes(self) -> tuple[Mode, ...]:
        return grouping.modes(self.sizes, self.columns, self.inside)

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        return round_up(self.columns * grouping.widest(self.sizes), LINE)

    @property
    def tiles(self) -> int:
        return 1 if all(map(_in_place, self.modes)) else 2

    @property
    def matrices(self) -> int:
        """Elements of all matrices, with zeros up to multiples of 16 columns."""
        return sum(map(_matrix, self.modes))

    @property
    def shared_bytes(self) -> int:
        scales = 4 * (self.columns + len(self.modes) + 1)
        return 2 * (self.tile * self.tiles + self.ahead + self.matrices) + round_up(scales, 16)

    def resident(self, arch: str) -> int:
        """Blocks that a multiprocessor holds."""
        is_large = max(mode.columns for mode in self.modes) > SMALL
        registers = REGISTERS_LARGE if is_large else REGISTERS
        return targets.resident_blocks(arch, 32 * self.warps, registers, self.shared_bytes)


def _in_place(mode: Mode) -> bool:
    return mode.rows == mode.columns <= IN_PLACE_MOST


def _matrix(mode: Mode) -> int:
    return mode.rows * round_up(mode.columns, 16)


def takes(sizes: tuple[Size, ...], dtype: str, inside: bool, arch: str) -> bool:
    """Whether the kernel takes factors of these sizes, on however many columns: chunks of eight
    neighbours throughout, and a column that shared memory holds."""
    if dtype not in ("float16", "bfloat16"):
        return False
    columns = CHUNK if inside else 1
    for mode in grouping.modes(sizes, columns, inside):
        if mode.rows % CHUNK or mode.columns % CHUNK or (mode.right > 1 and mode.right % CHUNK):
            return False
    return Halves(dtype, columns, inside, sizes, 8).shared_bytes <= targets.SHARED_BYTES[arch]


def most_columns(sizes: tuple[Size, ...], dtype: str, inside: bool, arch: str) -> int:
    """The widest tile, in columns: a power of two."""
    least, widest = CHUNK if inside else 1, grouping.widest(sizes)
    columns = max(least, min(WIDEST_TILE, TILE_ELEMENTS // widest))
    columns = 1 << (columns.bit_length() - 1)
    while columns > least and not _fits(Halves(dtype, columns, inside, sizes, 8), arch):
        columns //= 2
    return columns


def _fits(made: Halves, arch: str) -> bool:
    return made.shared_bytes <= targets.SHARED_BYTES[arch]


def columns_of(run: Run, dtype: str, arch: str, multiprocessors: int) -> int:
    """The columns of a launch's tiles: so few that each multiprocessor has two tiles."""
    shared = ceil_div(run.batch * run.columns, 2 * multiprocessors)
    most = min(run.columns, shared, most_columns(run.sizes, dtype, run.inside, arch))
    return max(CHUNK if run.inside else 1, 1 << (most.bit_length() - 1))


def variant(sizes: tuple[Size, ...], dtype: str, inside: bool, columns: int, arch: str) -> Halves:
    """The kernel of a launch, for tiles of so many columns."""
    warps = 4 if columns * grouping.widest(sizes) < TILE_ELEMENTS // 2 else 8
    made = Halves(dtype, columns, inside, sizes, warps)
    if made.resident(arch) > 1:
        return made
    made = made._replace(warps=16)
    return made._replace(ahead=ahead_of(made, arch))


def ahead_of(made: Halves, arch: str) -> int:
    """The elements of shared memory for what is read ahead."""
    free = (targets.SHARED_BYTES[arch] - made.shared_bytes) // 2 // LINE * LINE
    ahead = min(free, made.tile)
    return ahead if made.tiles == 1 and ahead * LEAST_AHEAD >= made.tile else 0


def spec(epilogue: tuple[Epilogue, ...], made: Halves, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    words = ["x".join(map(str, size)) for size in made.sizes]
    words += [f"{made.columns}c" + "i" * made.inside, f"{made.warps}w"]
    words += [f"{made.ahead}a"] * bool(made.ahead)
    description = text.describe("kronecker_product", KIND, made.dtype, "fp32", words, epilogue)
    source = _source(epilogue, made, max(1, min(made.resident(arch), 4)))
    entry, threads = "kronecker_product_halves", 32 * made.warps
    found = KernelSpec(
        "kronecker_product", source, entry, threads, made.shared_bytes, description=description
    )
    return named(found, made.dtype, *words[-4:], epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], made: Halves, blocks: int) -> str:
    """The generated CUDA text: types, ``Finish``, constants, the run, one include."""
    rows, widths = (", ".join(str(size[side]) for size in made.sizes) for side in (0, 1))
    wide, out = (made.columns * math.prod(size[side] for size in made.sizes) for side in (0, 1))
    cuda, is_fp16 = DTYPES[made.dtype].cuda, str(made.dtype == "float16").lower()
    found, at, listed = made.modes, 0, []
    for number, mode in enumerate(found):
        last = str(mode == found[-1]).lower()
        listed.append(f"Mode<{', '.join(map(str, mode))}, {last}, {at}, {number}>")
        at += _matrix(mode)
    return f"""{text.preamble(made.dtype, made.dtype, epilogue)}
using HalfT = {cuda};
constexpr bool HALF_IS_FP16 = {is_fp16};
constexpr int WARPS = {made.warps};
constexpr int MIN_BLOCKS = {blocks};
constexpr int TILE = {made.tile};
constexpr int TILES = {made.tiles};
constexpr int AHEAD = {made.ahead};
constexpr int MATRICES = {made.matrices};
constexpr int MODES = {len(found)};
constexpr int COLUMNS_SCALED = {made.columns};
constexpr int RUNS = 1;
constexpr int FACTORS = {len(made.sizes)};
__device__ constexpr int ROWS[] = {{{rows}}};
__device__ constexpr int WIDTHS[] = {{{widths}}};
constexpr int PARAMETER_BYTES = {parameters(1, len(made.sizes), epilogue).size};

#include "kronecker_product/halves/run.cuh"

struct Run {{
    using SourceT = {cuda};
    static constexpr int INDEX = 0, COLUMNS = {made.columns};
    static constexpr int IN_FEATURES = {wide // made.columns}, INPUTS = {wide};
    static constexpr int OUT_FEATURES = {out // made.columns}, OUTPUTS = {out};
    static constexpr bool COLUMNS_LAST = {str(made.inside).lower()}, WRITTEN_HERE = false;
    using Modes = List<{(", " + chr(10) + " " * 23).join(listed)}>;
}};

#include "kronecker_product/halves/halves.cuh"
"""


def step(
    epilogue: tuple[Epilogue, ...],
    run: Run,
    made: Halves,
    arch: str,
    multiprocessors: int,
    operands: tuple[tuple[str, int], ...],
) -> Step:
    """The launch. ``operands`` are the pointers of x, result and factors."""
    part = Part(made.dtype, made.dtype, made.columns, made.inside, made.sizes)
    tiles = run.outer * run.inner * ceil_div(run.columns, part.columns)
    numbers = run_numbers(run, part, (run.outer, run.columns), ((0, 0), (0, 0)))
    layout = parameters(1, len(run.factors), epilogue)
    fixed = layout.pack(*numbers, *matrix_numbers([run]), run.batch, 1, tiles, 0)
    blocks = min(tiles, max(1, made.resident(arch)) * multiprocessors)
    pointers = (*operands, *text.vector_pointers(epilogue))
    grid = blocks, min(run.batch, GRID_BATCH)
    scalars = text.scalar_count(epilogue)
    return Step(spec(epilogue, made, arch), grid, fixed, pointers, scalars)
