"""The kernel of kernel_sources/kronecker_sparse/interleaved/interleaved.cuh: batch first, d > 1.

Whole 32-byte sectors of neighbouring l move together, or all l of a k where they are fewer.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import hopper_common, pack
from kernlib.families.kronecker_sparse.lowering.problem import Problem, is_deep
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

KIND = "interleaved"
FIXED = "<10i"  # struct Fixed
STRIDES = "<6q"  # struct Strides, of what the copy engine does not move
OUT_BYTES = 64 * 1024  # at most, of staged columns: four slots
MAX_FEATURES = 2**31 - 1  # of the result, counted by an int


class Shape(NamedTuple):
    """How a tile takes the l of a problem: ``lanes`` a warpgroup, ``halves`` 2 where the two
    warpgroups share rows and split l; ``merged`` where all l of a k lie side by side and are
    taken, so that (k, l) is one dimension."""

    lanes: int
    halves: int
    merged: bool

    @property
    def span(self) -> int:
        return self.lanes * self.halves

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 if self.halves == 2 else 128


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    shape: Shape
    columns: int


class Tiling(NamedTuple):
    """Columns of a tile, widest first (64 KB of accumulators, half of that in 3xTF32, which has a
    second set of sums), and the depth of a stage."""

    columns: tuple[int, ...]
    depth: int


# By the products of a multiplication and bytes of an element, shapes by preference.
SHAPES = {
    (1, 2): {
        Shape(8, 2, True): Tiling((32, 24), 16),
        Shape(8, 1, True): Tiling((32, 24), 16),
        Shape(4, 1, True): Tiling((64, 48), 16),
        Shape(3, 1, True): Tiling((64,), 64),
        Shape(2, 1, True): Tiling((192, 128, 96, 64), 32),
        Shape(8, 2, False): Tiling((32, 24), 16),
    },
    (1, 4): {
        Shape(4, 1, True): Tiling((64, 48, 32, 24), 16),
        Shape(2, 1, True): Tiling((128, 96, 64, 48), 16),
        Shape(4, 2, False): Tiling((64, 48, 32, 24), 8),
    },
    (3, 4): {
        Shape(4, 1, True): Tiling((32, 24), 16),
        Shape(2, 1, True): Tiling((64, 48), 16),
        Shape(4, 2, False): Tiling((32, 24), 8),
    },
}


def shapes(dtype: str, precision: str) -> dict[Shape, Tiling]:
    """The tiles of a kind of numbers."""
    return SHAPES[hopper_common.products(dtype, precision), DTYPES[dtype].bytes]


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """The widths of tile for a problem, none if it is not one of this kernel's."""
    shape = shape_of(problem) if arch == hopper_common.ARCH else None
    if shape is None:
        return []
    return [
        {"columns": columns}
        for columns in _columns(problem.dtype, problem.precision, shape, problem.columns)
    ]


default = hopper_common.default


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call with the columns of ``choice``, one of :func:`candidates`."""
    variant = _variant(problem, int(choice["columns"]))
    packed = _packing(variant)
    row_tiles, column_tiles = ceil_div(problem.rows, variant.shape.rows), packed.tiles(problem)
    spans = packed.spans(problem)
    tiles = row_tiles * column_tiles * problem.blocks * spans
    strides = () if variant.shape.merged else _strides(problem)
    main = Step(
        spec(epilogue, variant),
        (min(multiprocessors, tiles), 1),
        _parameters(epilogue, variant.shape).pack(
            *strides,
            row_tiles, column_tiles, problem.blocks, problem.lanes, problem.rows, problem.columns,
            problem.depth, spans, tiles, 0,
        ),
        (("left", 0), ("out", 0), ("workspace", 0), *text.vector_pointers(epilogue)),
        text.scalar_count(epilogue),
        _maps(problem, variant) if variant.shape.merged else (),
    )  # fmt: skip
    return Lowered((pack.step(problem, packed), main), packed.workspace(problem))


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for products of b x c blocks (b, c and d are
    ``sizes``) and their gradients, and ``kinds`` of numbers: (dtype, precision)."""
    if arch != hopper_common.ARCH:
        return []
    made = [
        Variant(dtype, precision, shape, columns)
        for dtype, precision in kinds
        for shape in shapes(dtype, precision)
        for width in sizes[:2]
        for columns in _columns(dtype, precision, shape, width)
    ]
    found = [spec(epilogue, variant) for variant in made for epilogue in epilogues]
    packed = dict.fromkeys(_packing(variant) for variant in made)
    found += [spec for each in packed for spec in pack.specs(each)]
    return list(dict.fromkeys(found))


def _columns(dtype: str, precision: str, shape: Shape, count: int) -> list[int]:
    """Widths of tile by preference: those that pad the columns least, then the widest."""
    known = shapes(dtype, precision)[shape].columns
    return sorted(known, key=lambda columns: (round_up(count, columns), -columns))


def shape_of(problem: Problem) -> Shape | None:
    """How tiles take a problem's l; None for what the copy engine or the tiles do not take."""
    left, out, d = problem.left, problem.out, problem.lanes
    if d == 1 or left.lane != 1 or out.lane != 1 or is_deep(problem):
        return None
    tiles = ceil_div(problem.rows, 64) * ceil_div(problem.columns, 16) * problem.blocks * d
    if tiles > hopper_common.MAX_TILES or problem.columns * problem.blocks * d > MAX_FEATURES:
        return None
    whole = (left.depth == d or problem.depth == 1) and (out.column == d or problem.columns == 1)
    for shape in shapes(problem.dtype, problem.precision):
        if shape.merged and not (whole and d == shape.span):
            continue
        if not shape.merged and d < shape.span // 2:
            continue
        if hopper_common.addresses(problem, *_extents(problem, shape)):
            return shape
    return None


def _extents(problem: Problem, shape: Shape) -> tuple[tma.Extent, tma.Extent]:
    """Of x and of y; threads that copy chunks of 16 bytes ask the same of them as maps do."""
    left, out, d = problem.left, problem.out, problem.lanes
    rows, columns, depth, blocks = problem.rows, problem.columns, problem.depth, problem.blocks
    if shape.merged:
        x = tma.Extent((depth * d, blocks, rows, 1), (left.block, left.line, 0))
        y = tma.Extent((columns * d, blocks, rows, 1), (out.block, out.row, 0))
    else:
        x = tma.Extent((d, depth, blocks, rows), (left.depth, left.block, left.line))
        y = tma.Extent((d, columns, blocks, rows), (out.column, out.block, out.row))
    return x, y


def _variant(problem: Problem, columns: int) -> Variant:
    return Variant(problem.dtype, problem.precision, shape_of(problem), columns)


def depth_order(dtype: str, shape: Shape) -> tuple[int, ...]:
    """Which k each position along wgmma's depth stands for: thread t of a quad holds those of the
    16-byte chunks that it reads (interleaved/multiply.cuh)."""
    quad, pair = range(4), range(2)
    if dtype == "float32":
        if shape.halves == 2:
            return tuple(range(8))
        if shape.lanes == 4:
            return tuple(2 * t + e for e in pair for t in quad)
        return tuple(4 * t + 2 * step + e for step in pair for e in pair for t in quad)
    if shape.halves == 2:
        return tuple(4 * (2 * e + f) + t for e in pair for t in quad for f in pair)
    if shape.lanes == 8:
        return tuple(range(16))
    if shape.lanes in (3, 4):
        return tuple(4 * t + 2 * e + f for e in pair for t in quad for f in pair)
    return tuple(
        8 * t + 4 * step + 2 * e + f for step in pair for e in pair for t in quad for f in pair
    )


def _packing(variant: Variant) -> pack.Packing:
    dtype, precision, shape, columns = variant
    products, order = hopper_common.products(dtype, precision), depth_order(dtype, shape)
    depth = shapes(dtype, precision)[shape].depth
    return pack.Packing(dtype, columns, depth, shape.span, products, order)


def shared_memory(variant: Variant) -> tuple[int, int]:
    """Stages that fit beside staged columns of y, and bytes of all."""
    itemsize = DTYPES[variant.dtype].bytes
    rows, span = variant.shape.rows, variant.shape.span
    packed = _packing(variant)
    stage = rows * packed.depth * span * itemsize + packed.stage_bytes
    staged = min(rows * variant.columns * span * itemsize, OUT_BYTES)
    return hopper_common.stages(staged, stage)


def spec(epilogue: tuple[Epilogue, ...], variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, precision, shape, columns = variant
    stages, shared = shared_memory(variant)
    words = [f"{shape.rows}x{columns}x{shape.span}", *["merged"] * shape.merged]
    made = KernelSpec(
        "kronecker_sparse",
        _source(epilogue, variant, stages),
        "kronecker_sparse_interleaved",
        hopper_common.THREADS,
        shared,
        description=text.describe("kronecker_sparse", KIND, dtype, precision, words, epilogue),
    )
    return named(made, dtype, *[precision] * (dtype == "float32"), *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, stages: int) -> str:
    """The generated CUDA text: types, ``Finish``, a few constants, the wgmma, one include."""
    dtype, precision, shape, columns = variant
    # 128 accumulators of TF32 leave no registers for epilogues: half types are packed first.
    full = dtype == "float32" and columns * shape.lanes == 256
    return f"""{hopper_common.preamble(dtype, epilogue, staged=full)}
#define LANES {shape.lanes}
constexpr int HALVES = {shape.halves};
constexpr int TILE_COLUMNS = {columns};
constexpr int TILE_DEPTH = {shapes(dtype, precision)[shape].depth};
constexpr int STAGES = {stages};
constexpr int PARAMETER_BYTES = {_parameters(epilogue, shape).size};
#define MERGED {int(shape.merged)}
#define PRODUCTS {hopper_common.products(dtype, precision)}
#define HALF_INPUT {int(dtype != "float32")}

#include "common/hopper.cuh"
{multiply(dtype, columns, True)}
#include "kronecker_sparse/interleaved/interleaved.cuh"
"""


def _parameters(epilogue: tuple[Epilogue, ...], shape: Shape) -> Parameters:
    if shape.merged:
        return text.parameters(1, FIXED, epilogue, maps=2)
    return text.parameters(3, STRIDES + FIXED.removeprefix("<"), epilogue)


def _strides(problem: Problem) -> tuple[int, ...]:
    left, out = problem.left, problem.out
    return left.line, left.block, left.depth, out.row, out.block, out.column


def _maps(problem: Problem, variant: Variant) -> tuple[TensorMap, ...]:
    """Maps of x and of y, whose rows hold all l of several k or j."""
    dtype, shape = variant.dtype, variant.shape
    pairs = zip(_extents(problem, shape), (shape.rows, 64), strict=True)
    return tuple(
        tma.tensor_map(dtype, extent, (hopper_common.row(dtype), 1, rows, 1))
        for extent, rows in pairs
    )
