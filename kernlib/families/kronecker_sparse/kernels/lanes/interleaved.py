"""Products on Hopper, batch first, d > 1.

Whole 32-byte sectors of neighbouring l move together, or all l of a k where they are fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.lanes import via_batch_last
from kernlib.families.kronecker_sparse.kernels.lanes.via_batch_last import Transposed
from kernlib.families.kronecker_sparse.kernels.steps.pack import Pack, Packing
from kernlib.families.kronecker_sparse.lowering import hopper_common, shapes, times
from kernlib.families.kronecker_sparse.lowering.problem import Problem, Scope, is_small
from kernlib.families.kronecker_sparse.lowering.shapes import SHAPES, Shape
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

OUT_BYTES = 64 * 1024  # at most, of staged columns: four slots
SIZES = (
    "int row_tiles", "int column_tiles",
    "int blocks", "int lanes",  # a, d
    "int rows",  # batch
    "int columns", "int depth",  # b, c
    "int spans",  # of l
    "u32 tiles",  # of all
    "int unused",
)  # fmt: skip
# Where (k, l) is not one dimension, the copy engine moves neither x nor y.
STRIDES = "i64 x_row", "i64 x_block", "i64 x_depth", "i64 y_row", "i64 y_block", "i64 y_column"
FIXED = {True: Fields(SIZES), False: Fields((*STRIDES, *SIZES))}  # by whether it is


class Rates(NamedTuple):
    """Microseconds of a million numbers or bytes where nothing else is said."""

    launch: float
    byte: float  # of x and result
    stage: float
    result: float  # 100,000 bytes of a tile
    multiplication: float  # 10 million bytes of the weight by rows
    weight: float  # bytes of the packed one
    apart: float  # bytes of the result, where l end within sectors


# By the bytes of a number; :mod:`..lowering.times` says of what they were fitted to.
RATES = {
    2: Rates(5.94, 0.311, 0.248, 0.337, 0.0, 1.87, 1.76),
    4: Rates(4.1, 0.123, 0.498, 3.7, 0.933, 0.601, 0.886),
}


class Interleaved(Kernel):
    """Tiles of neighbouring l."""

    role = "factor"
    name = "interleaved"
    header = "kronecker_sparse/interleaved/interleaved.cuh"
    entry = "kronecker_sparse_interleaved"
    rank = 4
    reason = (
        "batch first with d > 1 and whole 16 bytes: neighbouring features of several l move "
        "together; chosen where a model of times says that it is faster than `portable` and "
        "than going by way of batch last"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        precision: str
        shape: Shape
        columns: int

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        return arch == hopper_common.ARCH and shapes.shape_of(problem) is not None

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The widths of tile."""
        shape = shapes.shape_of(problem)
        each = shapes.columns_of(problem.dtype, problem.precision, shape, problem.columns)
        return [{"columns": columns} for columns in each]

    def pays(self, problem: Problem, gpu: Gpu) -> bool:
        """Of few rows `portable` is faster, where there is no estimate."""
        return not is_small(problem)

    def estimate(self, problem: Problem, choice: Mapping[str, int], gpu: Gpu) -> float:
        """Microseconds of the first width. Where l are in whole sectors, the model of `transposed`
        decides between both, which was measured of larger problems."""
        if not times.knows(problem) or dict(choice) != self.default(problem, gpu):
            return super().estimate(problem, choice, gpu)
        is_rival = shapes.is_in_sectors(problem) and Transposed().takes(problem, gpu.arch)
        if is_rival and via_batch_last.is_faster(problem):
            return inf
        return microseconds(problem, choice)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem: the packing, and the product."""
        dtype, precision, shape = problem.dtype, problem.precision, shapes.shape_of(problem)
        variant = self.Variant(dtype, precision, shape, int(choice["columns"]))
        packing = packing_of(variant)
        row_tiles, column_tiles = ceil_div(problem.rows, shape.rows), packing.tiles(problem)
        spans = packing.spans(problem)
        tiles = row_tiles * column_tiles * problem.blocks * spans
        fixed = FIXED[shape.merged].values(
            **({} if shape.merged else _strides(problem)),
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            **problem.sizes,
            spans=spans,
            tiles=tiles,
            unused=0,
        )
        main = Step(
            self.spec(epilogue, variant, gpu.arch),
            (min(gpu.multiprocessors, tiles), 1),
            _parameters(epilogue, shape).pack(*fixed),
            text.pointers(("left", "out", "workspace"), epilogue),
            text.scalar_count(epilogue),
            _maps(problem, variant) if shape.merged else (),
        )
        return Lowered((Pack().step(problem, packing), main), packing.workspace(problem))

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of any d, as strides decide with it."""
        is_hopper = scope.arch == hopper_common.ARCH
        tilings = [each for of_kind in SHAPES.values() for each in of_kind.items()]
        return {
            "dtype": scope.dtypes if is_hopper else [],
            "precision": scope.precisions,
            "shape": dict.fromkeys(shape for shape, _ in tilings),
            "columns": dict.fromkeys(n for _, tiling in tilings for n in tiling.columns),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether there is such a tile."""
        dtype, precision, shape, columns = variant
        if (dtype, precision) not in scope.numbers:
            return False
        tiling = shapes.shapes(dtype, precision).get(shape)
        return tiling is not None and columns in tiling.columns

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants, and of what packs their weights."""
        packs = Pack().specs_of(map(packing_of, self.variants(epilogue, scope)))
        return super().specs(epilogue, scope, arch) + packs

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, precision, shape, columns = variant
        stages, shared = shared_memory(variant)
        words = [f"{shape.rows}x{columns}x{shape.span}", *["merged"] * shape.merged]
        # 128 accumulators of TF32 leave no registers for epilogues: half types are packed first.
        full = dtype == "float32" and columns * shape.lanes == 256
        facts = {
            **hopper_common.facts(dtype, precision, epilogue, staged=full),
            "LANES": shape.lanes,
            "HALVES": shape.halves,
            "MERGED": shape.merged,
            "TILE_COLUMNS": columns,
            "TILE_DEPTH": shapes.shapes(dtype, precision)[shape].depth,
            "STAGES": stages,
            "PARAMETER_BYTES": _parameters(epilogue, shape).size,
        }
        finish = hopper_common.finish(epilogue, staged=full)
        texts = FIXED[shape.merged].text(), finish, multiply(dtype, columns, True)
        source = self.source(facts, *texts, includes=hopper_common.INCLUDES)
        threads = hopper_common.THREADS
        return self.named_spec(source, threads, shared, dtype, words, epilogue, precision)


def microseconds(problem: Problem, choice: Mapping[str, object]) -> float:
    """What a problem that :func:`times.knows` takes by columns of a choice."""
    columns, item = int(choice["columns"]), DTYPES[problem.dtype].bytes
    rates, shape = RATES[item], shapes.shape_of(problem)
    depth = shapes.shapes(problem.dtype, problem.precision)[shape].depth
    packing = Packing(problem.dtype, columns, depth, shape.span, 1)
    tiles = ceil_div(problem.rows, shape.rows) * packing.tiles(problem)
    tiles *= problem.blocks * packing.spans(problem)
    stages = packing.stages(problem)
    products = hopper_common.products(problem.dtype, problem.precision)
    multiplications = packing.stage_bytes * shape.rows * products / 1e7
    of_tile = stages * (rates.stage + rates.multiplication * multiplications)
    of_tile += rates.result * shape.rows * columns * shape.span * item / 1e5
    x, y, _ = times.numbers(problem)
    moved = (rates.byte * (x + y) + rates.apart * y * (not shapes.is_in_sectors(problem))) * item
    moved += rates.weight * packing.workspace(problem)
    return rates.launch + moved / 1e6 + times.rounds(tiles, times.MULTIPROCESSORS) * of_tile


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


def packing_of(variant: Interleaved.Variant) -> Packing:
    dtype, precision, shape, columns = variant
    products, order = hopper_common.products(dtype, precision), depth_order(dtype, shape)
    depth = shapes.shapes(dtype, precision)[shape].depth
    return Packing(dtype, columns, depth, shape.span, products, order)


def shared_memory(variant: Interleaved.Variant) -> tuple[int, int]:
    """Stages that fit beside staged columns of y, and bytes of all."""
    itemsize = DTYPES[variant.dtype].bytes
    rows, span = variant.shape.rows, variant.shape.span
    packing = packing_of(variant)
    stage = rows * packing.depth * span * itemsize + packing.stage_bytes
    staged = min(rows * variant.columns * span * itemsize, OUT_BYTES)
    return hopper_common.stages(staged, stage)


def _parameters(epilogue: tuple[Epilogue, ...], shape: Shape) -> Parameters:
    pointers, maps = (1, 2) if shape.merged else (3, 0)
    return text.parameters(pointers, FIXED[shape.merged].format, epilogue, maps)


def _strides(problem: Problem) -> dict[str, int]:
    left, out = problem.left, problem.out
    of_x = {"x_row": left.line, "x_block": left.block, "x_depth": left.depth}
    return of_x | {"y_row": out.row, "y_block": out.block, "y_column": out.column}


def _maps(problem: Problem, variant: Interleaved.Variant) -> tuple[TensorMap, ...]:
    """Maps of x and of y, whose rows hold all l of several k or j."""
    x, y = shapes.extents(problem, variant.shape)
    return hopper_common.maps(variant.dtype, (x, variant.shape.rows), (y, 64))
