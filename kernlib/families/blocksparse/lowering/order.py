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
PARAMETERS = Parameters(2, "<4iI6i4x")
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
    sizes = _groups(problem), units, lines, words
    numbers = *sizes, first, share.bit_length(), *keys(depth)
    pointers = ((name, 0), (WORKSPACE, 0))
    return Step(spec(TILE_LINES // _size(problem)), (1, 1), PARAMETERS.pack(*numbers), pointers)


def keys(depth: int, per_group: int = 1, last_group: int = 0) -> tuple[int, ...]:
    """What units of ``depth`` steps at most are sorted by: what their number of steps is shifted
    by, the keys of all groups, units of a group, the last group, the keys of one.

    Nothing for fewer than 1024 blocks along the depth, 65536 elements of blocks of 64; of more, or
    in several groups, units come as equals whose lengths differ by less than a 512th, of so many
    groups, of the longest possible."""
    room = KEYS // (last_group + 1)
    shift = 0
    while (depth >> shift) >= room:
        shift += 1
    own = (depth >> shift) + 1
    return shift, own * (last_group + 1), per_group, last_group, own


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
