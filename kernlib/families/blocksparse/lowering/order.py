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
TILE_LINES = 128
GROUPS = (1, 2, 4, 8)  # lines of blocks of a tile
PARAMETERS = Parameters(2, "<4iIi")


def workspace(problem: Spmm) -> int:
    """Bytes for the counter and the order."""
    return 4 * (1 + _groups(problem) * problem.blocks.heads)


def step(units: int, problem: Spmm, first: int) -> Step:
    """The launch for a problem of so many units, whose counter gives ``first`` first."""
    blocks = problem.blocks
    lines, words, name = blocks.grid_rows, blocks.row_words, "row_bits"
    if problem.transposed:
        lines, words, name = blocks.grid_cols, blocks.col_words, "col_bits"
    fixed = PARAMETERS.pack(_groups(problem), units, lines, words, first, 0)
    return Step(spec(TILE_LINES // _size(problem)), (1, 1), fixed, ((name, 0), (WORKSPACE, 0)))


def specs() -> list[KernelSpec]:
    """All of them."""
    return [spec(group) for group in GROUPS]


def spec(group: int) -> KernelSpec:
    """The KernelSpec for tiles of so many lines of blocks."""
    source = f"""#include "common/types.cuh"

constexpr int GROUP = {group};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "blocksparse/order/order.cuh"
"""
    words = f"blocksparse order of tiles of {group} lines of blocks"
    shared = 4 * MOST_UNITS
    made = KernelSpec(
        "blocksparse", source, "blocksparse_order", THREADS, shared, description=words
    )
    return named(made, f"lines={group}")


def _size(problem: Spmm) -> int:
    """Lines of a block of op(S)."""
    blocks = problem.blocks
    return blocks.cols if problem.transposed else blocks.rows


def _groups(problem: Spmm) -> int:
    return ceil_div(problem.lines, TILE_LINES)
