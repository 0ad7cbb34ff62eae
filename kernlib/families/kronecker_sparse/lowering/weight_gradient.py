"""Gradients of a weight by the kernel of kernel_sources/kronecker_sparse/hopper/hopper.cuh, half
types.

The batch is their depth, long and in parts that CTAs sum on their own; split_k_sum.cuh adds those
up, in order. Left is the gradient of the result, right is x: each with the batch contiguous (batch
last), or with features contiguous and d = 1 (batch first).
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import hopper_common, portable
from kernlib.families.kronecker_sparse.lowering.hopper import FIXED, TILE_ROWS
from kernlib.families.kronecker_sparse.lowering.problem import Layout, Problem, is_deep
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

KIND = "gradient"
TILE_DEPTH = hopper_common.ROW_BYTES // 2
PARAMETERS = Parameters(1, FIXED, maps=2)
COLUMNS = (16, 32, 48, 64, 96, 128, 192, 256)
WHOLE_COLUMNS = (64, 128, 192, 256)  # of several tiles, or where columns lie side by side
MIN_PART = 8  # blocks of depth; shorter parts wait more than they sum
WAVES = 2  # of CTAs at most


class Variant(NamedTuple):
    """Everything that code generation chooses."""

    dtype: str
    left_lines: bool  # whether features lie side by side, else the batch
    right_lines: bool
    columns: int


def candidates(problem: Problem, arch: str, mixed: bool = False) -> list[Choice]:
    """The width of tile for a problem, none if it is not one of this kernel's. Only who asks for
    ``mixed`` operands, one with the batch last, has kernels for them."""
    if arch != hopper_common.ARCH or not is_deep(problem) or problem.dtype == "float32":
        return []
    lines = _lines(problem)
    if lines is None or (lines[0] != lines[1] and not mixed):
        return []
    if portable.tile_count(problem, TILE_ROWS, 16) > hopper_common.MAX_TILES:
        return []
    return [{"columns": columns_of(problem.columns, lines[1])}]


default = hopper_common.default


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call. An epilogue needs whole sums: those go to the portable kernel."""
    if epilogue:
        return portable.lower_untuned(epilogue, problem, arch, multiprocessors)
    columns = int(choice["columns"])
    variant = Variant(problem.dtype, *_lines(problem), columns)
    row_tiles, column_tiles = ceil_div(problem.rows, TILE_ROWS), ceil_div(problem.columns, columns)
    blocks = ceil_div(problem.depth, TILE_DEPTH)
    part = part_of(blocks, portable.tile_count(problem, TILE_ROWS, columns), multiprocessors)
    parts = ceil_div(blocks, part)
    partial, one = portable.partial_layout(problem)
    tiles = portable.tile_count(problem, TILE_ROWS, columns) * parts
    fixed = PARAMETERS.pack(
        row_tiles, column_tiles, problem.blocks, problem.lanes, problem.rows, problem.columns,
        problem.depth, part, partial.row, tiles,
    )  # fmt: skip
    main = Step(
        spec(variant),
        (min(multiprocessors, tiles), 1),
        fixed,
        (("left", 0), ("right", 0), ("workspace", 0)),
        maps=_maps(problem, variant),
    )
    return Lowered((main, portable.reduce_step(problem, partial, one, parts)), 4 * one * parts)


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for the gradients of weights of b x c blocks (b, c
    and d are ``sizes``), for products of few rows and their gradients by x, and ``kinds`` of
    numbers: (dtype, precision)."""
    if arch != hopper_common.ARCH:
        return []
    halves = [dtype for dtype, _ in kinds if dtype != "float32"]
    found = [
        spec(Variant(dtype, lines, lines, columns_of(count, lines)))
        for dtype in halves
        for lines in (False, True)
        for count in sizes[:2]
    ]
    return list(dict.fromkeys(found + [portable.reduce_spec(dtype) for dtype in halves]))


def mixed(dtype: str, count: int) -> KernelSpec:
    """The spec for a gradient that has the batch last and an x of so many columns that has not."""
    return spec(Variant(dtype, False, True, columns_of(count, True)))


def columns_of(count: int, lines: bool) -> int:
    """The narrowest tile that holds all columns, else the one that pads them least."""
    known = WHOLE_COLUMNS if lines or count > COLUMNS[-1] else COLUMNS
    if count <= known[-1]:
        return next(columns for columns in known if columns >= count)
    return min(known[1:], key=lambda columns: (round_up(count, columns), -columns))


def part_of(blocks: int, tiles: int, multiprocessors: int) -> int:
    """Blocks of depth of a part, of all blocks and for so many tiles: as many parts as fill a
    device's waves best."""
    best, filled = blocks, 0.0
    for parts in range(1, max(1, WAVES * multiprocessors // tiles) + 1):
        part = ceil_div(blocks, parts)
        if part < MIN_PART and parts > 1:
            break
        # The last wave, and what uneven parts leave idle.
        waves = ceil_div(tiles * ceil_div(blocks, part), multiprocessors)
        share = tiles * blocks / (waves * multiprocessors * part)
        if share > filled + 0.02:
            best, filled = part, share
    return best


def _lines(problem: Problem) -> tuple[bool, bool] | None:
    """Whether each operand has features side by side, not the batch; None for neither, or for what
    the copy engine does not take. Both are alike where they may be."""
    sides = (problem.left, problem.rows), (problem.right, problem.columns)
    of_sides = []
    for side, count in sides:
        layouts = [
            lines
            for lines in (False, True)
            if (side.line if lines else side.depth) == 1
            and tma.addressable(problem.dtype, side.alignment, _extent(problem, side, count, lines))
        ]
        of_sides.append(layouts)
    pairs = [(left, right) for left in of_sides[0] for right in of_sides[1]]
    return min(pairs, key=lambda pair: pair[0] != pair[1], default=None)


def _extent(problem: Problem, side: Layout, count: int, lines: bool) -> tma.Extent:
    depth, lanes, blocks = problem.depth, problem.lanes, problem.blocks
    if lines:
        return tma.Extent((count, lanes, depth, blocks), (side.lane, side.depth, side.block))
    return tma.Extent((depth, lanes, count, blocks), (side.lane, side.line, side.block))


def _maps(problem: Problem, variant: Variant) -> tuple[TensorMap, ...]:
    """Maps of both operands."""
    dtype, *lines, columns = variant
    sides = (problem.left, problem.rows, TILE_ROWS), (problem.right, problem.columns, columns)
    return tuple(
        tma.tensor_map(
            dtype,
            _extent(problem, side, count, is_lines),
            (TILE_DEPTH, 1, TILE_DEPTH if is_lines else width, 1),
        )
        for (side, count, width), is_lines in zip(sides, lines, strict=True)
    )


def spec(variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, left_lines, right_lines, columns = variant
    width = round_up(columns, TILE_DEPTH) if right_lines else columns
    stages, shared = hopper_common.stages(0, (TILE_ROWS + width) * hopper_common.ROW_BYTES)
    words = [f"{TILE_ROWS}x{columns}", "batch_first" if left_lines else "batch_last"]
    if left_lines != right_lines:
        words += ["by", "batch_first" if right_lines else "batch_last"]
    made = KernelSpec(
        "kronecker_sparse",
        _source(variant, stages),
        "kronecker_sparse_hopper",
        hopper_common.THREADS,
        shared,
        description=text.describe("kronecker_sparse", KIND, dtype, "fp32", words, ()),
    )
    return named(made, "weight gradient", dtype, *words)


def _source(variant: Variant, stages: int) -> str:
    """The generated CUDA text: types, a few constants, the wgmma, one include."""
    dtype, left_lines, right_lines, columns = variant
    return f"""{hopper_common.preamble(dtype, ())}
constexpr bool BATCH_LAST = {str(left_lines).lower()};
constexpr bool OUT_LAST = BATCH_LAST;
constexpr int TILE_COLUMNS = {columns};
constexpr int STAGES = {stages};
constexpr int OUT_PARTS = 1;
constexpr int RESIDENT = 0;
constexpr int PARAMETER_BYTES = {PARAMETERS.size};
constexpr bool RIGHT_LINES = {str(right_lines).lower()};
#define PARTIAL 1
#define PACKED 0
#define PRODUCTS 1
#define HALF_INPUT 1

#include "common/hopper.cuh"
{multiply(dtype, columns, False, left_lines, right_lines)}
#include "kronecker_sparse/hopper/hopper.cuh"
"""
