"""The kernel of kernel_sources/blocksparse/tiles/tiles.cuh: square blocks of 16, 32
and 64 of a product of dense matrices in half types, where whole tiles are multiplied and the blocks
of these that are stored are kept.

The copy engine wants strides of whole 16 bytes, and values lie slot behind slot; other layouts, and
few blocks, go to the other kernels.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels import sampled
from kernlib.families.blocksparse.lowering import hopper, sampled_hopper, stationary
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

KIND = "tiles"
LISTS = ("row_bits", "row_ranks", "counts", "out")
FIXED = "qI12i"  # struct Fixed
TILE_LINES, TILE_COLUMNS, ROW = 128, 256, 64
STAGES, STAGE_BYTES, WARPGROUPS = 4, (TILE_LINES + TILE_COLUMNS) * ROW * 2, 2
MOST_TILES = 2**31 - 1

# Nanoseconds, of which only quotients count. Of an H100's 132 multiprocessors together a block by
# the other kernels and 64 of the depth, as measured in gradients at 4096 in all dimensions; of one
# of them a tile and 64 of the depth, by the same, and what its start and its stores take.
OTHERS_BLOCK, OTHERS_COUNT = {16: 0.31, 32: 0.82, 64: 2.4}, 132
STEP, START_STEPS = 720.0, 4


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    block: int
    left_lines: bool
    right_lines: bool


def takes(problem: Sdd, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    if problem.summands or not stationary.is_of_squares(problem, arch):
        return False
    return _tiles(problem) <= MOST_TILES


def pays(problem: Sdd, multiprocessors: int) -> bool:
    """Whether it takes less time than the other kernels, if all slots hold a block and no tile is
    without one."""
    steps = ceil_div(problem.depth, ROW)
    own = ceil_div(_tiles(problem), multiprocessors) * (steps + START_STEPS) * STEP
    blocks = problem.blocks
    others = blocks.capacity * problem.batch * steps * OTHERS_BLOCK[blocks.rows] * OTHERS_COUNT
    if blocks.rows < sampled_hopper.ROW:  # few blocks wait for their operands
        waiting = sampled.best_microseconds(problem, hopper.ARCH, multiprocessors) - sampled.START
        others = max(others, 1000 * waiting * multiprocessors)
    return own * multiprocessors <= others


def lower(epilogue: tuple[Epilogue, ...], problem: Sdd, arch: str, multiprocessors: int) -> Lowered:
    """The launch of a problem that the kernel takes."""
    step = Step(
        spec(epilogue, variant(problem)),
        (min(multiprocessors, _tiles(problem)), 1),
        parameters(epilogue).pack(*numbers(problem), *sampled_hopper.differs(problem)),
        tuple((name, 0) for name in ("a", "b", *LISTS)),
        text.scalar_count(epilogue),
        sampled_hopper.operand_maps(problem),
    )
    return Lowered((step,))


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    if arch != hopper.ARCH or block[0] != block[1] or block[0] not in stationary.SIZES:
        return []
    if text.summands(epilogue):
        return []
    flags, halves = (False, True), [dtype for dtype in dtypes if dtype != "float32"]
    return [
        spec(epilogue, Variant(dtype, block[0], *rest))
        for dtype, *rest in product(halves, flags, flags)
    ]


def variant(problem: Sdd) -> Variant:
    """The kernel of a problem that it takes."""
    return Variant(problem.dtype, problem.blocks.rows, *sampled_hopper.lines_last(problem))


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, block, left, right = made
    words = ["sdd", f"{block}x{block}"] + ["left_lines"] * left + ["right_lines"] * right
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int BLOCK = {block};
constexpr bool LEFT_LINES = {str(left).lower()};
constexpr bool RIGHT_LINES = {str(right).lower()};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "common/hopper.cuh"

{multiply(dtype, TILE_COLUMNS, False, left, right)}
#include "blocksparse/tiles/tiles.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_tiles",
        hopper.THREADS,
        shared_bytes(),
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def shared_bytes() -> int:
    """Stages, a part of each warpgroup's result, of each stage two barriers and two words, and what
    lies in front of whole 1024 bytes."""
    return STAGES * (STAGE_BYTES + 2 * 8 + 2 * 4) + WARPGROUPS * hopper.PIECE_BYTES + 1024


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: maps, the layout's words, the result, the epilogue's numbers, sizes."""
    return text.parameters(len(LISTS), f"<{FIXED}", epilogue, maps=2)


def numbers(problem: Sdd) -> list[int]:
    """What the parameter struct holds in front of the operands' flags: as its second the tiles."""
    blocks, down, across = problem.blocks, *_tiles_of_head(problem)
    return [
        problem.values.batch,
        *(_tiles(problem), down, across, ceil_div(problem.depth, ROW)),
        *(blocks.grid_rows, blocks.row_words, blocks.heads, blocks.capacity, problem.batch),
    ]


def _tiles_of_head(problem: Sdd) -> tuple[int, int]:
    """Down and across."""
    blocks = problem.blocks
    return (
        ceil_div(blocks.rows * blocks.grid_rows, TILE_LINES),
        ceil_div(blocks.cols * blocks.grid_cols, TILE_COLUMNS),
    )


def _tiles(problem: Sdd) -> int:
    """Of all heads and batches."""
    down, across = _tiles_of_head(problem)
    return down * across * problem.blocks.heads * problem.batch
