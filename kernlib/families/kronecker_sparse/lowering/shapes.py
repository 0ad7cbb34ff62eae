"""How tiles of `interleaved` take the l of products batch first, d > 1."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import Problem, is_deep
from kernlib.families.kronecker_sparse.lowering.times import SECTOR
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES

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


def shape_of(problem: Problem) -> Shape | None:
    """How tiles take a problem's l; None for what the copy engine or the tiles do not take."""
    left, out, d = problem.left, problem.out, problem.lanes
    if d == 1 or left.lane != 1 or out.lane != 1 or is_deep(problem):
        return None
    tiles = ceil_div(problem.rows, 64) * ceil_div(problem.columns, 16) * problem.blocks * d
    if tiles > hopper_common.MAX_TILES or problem.columns * problem.blocks * d > MAX_FEATURES:
        return None
    is_contiguous = (left.depth == d or problem.depth == 1) and (
        out.column == d or problem.columns == 1
    )
    for shape in shapes(problem.dtype, problem.precision):
        if shape.merged and not (is_contiguous and d == shape.span):
            continue
        if not shape.merged and d < shape.span // 2:
            continue
        if hopper_common.addresses(problem, *extents(problem, shape)):
            return shape
    return None


def extents(problem: Problem, shape: Shape) -> tuple[tma.Extent, tma.Extent]:
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


def columns_of(dtype: str, precision: str, shape: Shape, count: int) -> list[int]:
    """Widths of tile by preference: those that pad the columns least, then the widest."""
    return hopper_common.by_padding(shapes(dtype, precision)[shape].columns, count)


def is_in_sectors(problem: Problem) -> bool:
    """Whether all l of a k are whole sectors, or merged with the next."""
    has_sectors = problem.lanes * DTYPES[problem.dtype].bytes % SECTOR == 0
    return has_sectors or shape_of(problem).merged
