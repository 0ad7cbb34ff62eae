"""The kernel of kernel_sources/blocksparse/sampled_hopper/sampled_hopper.cuh: blocks of 64 and 128
of a product of dense matrices in half types.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

KIND = "hopper"
LISTS = ("rows", "cols")
FIXED = "I8i"  # struct Fixed
ROW = hopper.ROW
STAGE_BYTES = 192 * 1024  # of all of them
OUT_BYTES = 2 * hopper.OUT_PARTS * hopper.PIECE_BYTES
BARRIER_BYTES = 256  # and words that are said of stages
SHARED_BYTES = STAGE_BYTES + OUT_BYTES + BARRIER_BYTES + 1024  # swizzled rows begin at whole 1024


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    rows: int  # of a block
    cols: int
    left_lines: bool
    right_lines: bool

    @property
    def slots(self) -> int:
        """Of a tile."""
        return min(4 // (self.rows // 64), 4 // (self.cols // 64))


def takes(problem: Sdd, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    blocks, kind = problem.blocks, problem.dtype
    if arch != hopper.ARCH or kind == "float32" or not blocks.capacity or not problem.depth:
        return False
    if blocks.rows not in hopper.SIZES or blocks.cols not in hopper.SIZES:
        return False
    if hopper.is_across(problem.a) is None or hopper.is_across(problem.b) is None:
        return False
    if _tiles(problem) > hopper.MOST_TILES:
        return False
    given = ((problem.a, _left(problem)), (problem.b, _right(problem)))
    if not all(tma.addressable(kind, t.alignment, extent) for t, extent in given):
        return False
    values = problem.values
    return values.column == 1 and tma.addressable(kind, values.alignment, _values(problem))


def lower(epilogue: tuple[Epilogue, ...], problem: Sdd, arch: str, multiprocessors: int) -> Lowered:
    """The launch of a problem that the kernel takes."""
    made, a, b = variant(problem), problem.a, problem.b
    maps = tuple(
        tma.tensor_map(problem.dtype, extent, (ROW, ROW, 1, 1))
        for extent in (_left(problem), _right(problem), _values(problem))
    )
    sides = [
        number
        for side in problem.summands
        for number in (side.batch, side.slot, side.row, side.column)
    ]
    numbers = (
        _tiles(problem),
        _groups(problem),
        ceil_div(problem.depth, ROW),
        problem.blocks.capacity,
        problem.blocks.grid_rows,
        *(int(a.head > 0), int(a.batch > 0), int(b.head > 0), int(b.batch > 0)),
    )
    pointers = tuple((name, 0) for name in ("a", "b", "out", *LISTS))
    step = Step(
        spec(epilogue, made),
        (min(multiprocessors, _tiles(problem)), 1),
        parameters(epilogue).pack(*sides, *numbers),
        pointers + text.vector_pointers(epilogue) + text.summand_pointers(epilogue),
        text.scalar_count(epilogue),
        maps,
    )
    return Lowered((step,))


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    if arch != hopper.ARCH or not set(block) <= set(hopper.SIZES):
        return []
    flags = (False, True)
    return [
        spec(epilogue, Variant(dtype, *block, left, right))
        for dtype in dtypes
        if dtype != "float32"
        for left in flags
        for right in flags
    ]


def variant(problem: Sdd) -> Variant:
    """The kernel of a problem that it takes."""
    blocks, (left, right) = problem.blocks, _lines_last(problem)
    return Variant(problem.dtype, blocks.rows, blocks.cols, left, right)


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, rows, cols, left, right = made
    words = ["sdd", f"{rows}x{cols}"] + ["left_lines"] * left + ["right_lines"] * right
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int ROWS = {rows};
constexpr int COLS = {cols};
constexpr bool LEFT_LINES = {str(left).lower()};
constexpr bool RIGHT_LINES = {str(right).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "common/hopper.cuh"

{multiply(dtype, cols, False, left, right)}
#include "blocksparse/sampled_hopper/sampled_hopper.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_sampled_hopper",
        hopper.THREADS,
        SHARED_BYTES,
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: maps, the layout's slots, the epilogue's, sizes."""
    before = hopper.SIDE * len(text.summands(epilogue))
    return text.parameters(len(LISTS), f"<{before}{FIXED}", epilogue, maps=3)


def _groups(problem: Sdd) -> int:
    return ceil_div(problem.blocks.capacity, variant(problem).slots)


def _tiles(problem: Sdd) -> int:
    return _groups(problem) * problem.batch


def _lines_last(problem: Sdd) -> tuple[bool, bool]:
    """Whether a has its rows side by side, and b its columns; where the depth is, they are not."""
    return bool(hopper.is_across(problem.a)), not hopper.is_across(problem.b)


# Tensors as the copy engine is told of them: what serves all heads or batches is one.


def _left(problem: Sdd) -> tma.Extent:
    blocks = problem.blocks
    return _extent(problem, problem.a, blocks.rows * blocks.grid_rows, problem.depth)


def _right(problem: Sdd) -> tma.Extent:
    blocks = problem.blocks
    return _extent(problem, problem.b, problem.depth, blocks.cols * blocks.grid_cols)


def _extent(problem: Sdd, t: Dense, lines: int, columns: int) -> tma.Extent:
    heads = problem.blocks.heads if t.head else 1
    batch = problem.batch if t.batch else 1
    ends, step = (columns, lines), t.line
    if hopper.is_across(t):
        ends, step = (lines, columns), t.column
    return tma.Extent((*ends, heads, batch), (step, t.head, t.batch))


def _values(problem: Sdd) -> tma.Extent:
    blocks, values = problem.blocks, problem.values
    sizes = (blocks.cols, blocks.rows, blocks.capacity, problem.batch)
    return tma.Extent(sizes, (values.row, values.slot, values.batch))
