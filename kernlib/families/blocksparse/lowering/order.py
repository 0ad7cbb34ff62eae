"""The kernel of kernel_sources/blocksparse/order/order.cuh: the order in which blocks take a
product's tiles."""

from __future__ import annotations

from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS, MOST_UNITS = 1024, 4096
KEYS = THREADS  # lengths that are told apart
WARP = 32
TILE_LINES = 128
PARAMETERS = Parameters(2, "<4iI3i")
SHARED_BYTES = 4 * WARP + 2 * (MOST_UNITS + KEYS + THREADS // WARP * KEYS)  # struct Shared


def workspace(problem: Spmm) -> int:
    """Bytes for the counter and the order."""
    return 4 * (1 + _groups(problem) * problem.blocks.heads)


def step(units: int, problem: Spmm, first: int) -> Step:
    """The launch for a problem of so many units, whose counter gives ``first`` first."""
    blocks = problem.blocks
    lines, depth, words, name = *blocks[2:4], blocks.row_words, "row_bits"
    if problem.transposed:
        lines, depth, words, name = depth, lines, blocks.col_words, "col_bits"
    share = min(WARP, words) - 1  # of a warp's lanes
    shift = key_shift(depth)
    numbers = (
        _groups(problem),
        units,
        lines,
        words,
        first,
        share.bit_length(),
        shift,
        (depth >> shift) + 1,
    )
    pointers = ((name, 0), (WORKSPACE, 0))
    return Step(spec(TILE_LINES // _size(problem)), (1, 1), PARAMETERS.pack(*numbers), pointers)


def key_shift(depth: int) -> int:
    """What the number of steps of a unit, ``depth`` at most, is shifted by so that it is a key:
    nothing for fewer than 1024 blocks along the depth, 65536 elements of blocks of 64; of more,
    units whose lengths differ by less than a 512th of the longest possible come as equals."""
    return max(0, depth.bit_length() - (KEYS - 1).bit_length())


def variants(block: tuple[int, int]) -> list[KernelSpec]:
    """Every spec that :func:`step` can choose for blocks of a size."""
    return [spec(TILE_LINES // size) for size in dict.fromkeys(block)]


def spec(group: int) -> KernelSpec:
    """The KernelSpec for tiles of so many lines of blocks."""
    source = f"""#include "common/types.cuh"

constexpr int GROUP = {group};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "blocksparse/order/order.cuh"
"""
    words = f"blocksparse order of tiles of {group} lines of blocks"
    made = KernelSpec(
        "blocksparse", source, "blocksparse_order", THREADS, SHARED_BYTES, description=words
    )
    return named(made, f"lines={group}")


def _size(problem: Spmm) -> int:
    """Lines of a block of op(S)."""
    blocks = problem.blocks
    return blocks.cols if problem.transposed else blocks.rows


def _groups(problem: Spmm) -> int:
    return ceil_div(problem.lines, TILE_LINES)
