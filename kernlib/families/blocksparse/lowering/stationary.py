"""The kernel of kernel_sources/blocksparse/stationary/stationary.cuh: square blocks of 16, 32 and
64 of a product of dense matrices in half types whose depth is small, as in attention scores.

A unit is 512 rows of a head and a batch beside some panels of 128 columns. The copy engine wants
strides of whole 16 bytes, and values lie slot behind slot; other layouts, and greater depths, go to
the other kernels.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels import sampled
from kernlib.families.blocksparse.lowering import hopper, sampled_hopper
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step

KIND = "stationary"
LISTS = ("row_bits", "row_ranks", "counts", "out")
FIXED = "qI13i"  # struct Fixed
SIZES, DEPTHS = (16, 32, 64), (64, 128)  # of blocks; depths are filled up with zeros
WARPS, WARP_ROWS, PANEL = 16, 32, 128
UNIT_ROWS, THREADS = WARPS * WARP_ROWS, 32 * (WARPS + 4)
ROOM = 192 * 1024  # of stages, and of rows of blocks on their way out
MOST_UNITS = 2**31 - 1
START_PANELS = 2  # whose time the rows of a unit take, and what a unit waits for at its start

# Nanoseconds, of which only quotients count: of an H200's 132 multiprocessors together, a block by
# the other kernels at a depth of 64, as measured for densities from 0.1 to 0.5, and a third more at
# 128; of one of them a panel of a unit without blocks, and what all of its blocks add.
OTHERS_BLOCK, OTHERS_COUNT = {16: 0.92, 32: 2.4, 64: 4.2}, 132
EMPTY_PANEL, FULL_PANEL = 250.0, 3700.0


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    block: int
    depth: int  # at most
    left_lines: bool
    right_lines: bool


def takes(problem: Sdd, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    deepest = _depths(len(problem.summands))[-1]
    return (
        problem.depth <= deepest
        and is_of_squares(problem, arch)
        and _row_groups(problem) * _panels(problem) <= MOST_UNITS
    )


def is_of_squares(problem: Sdd, arch: str) -> bool:
    """Whether a problem is one of square blocks of SIZES and half types on Hopper, whose operands
    the copy engine reads, and whose values lie slot behind slot."""
    blocks, kind = problem.blocks, problem.dtype
    if arch != hopper.ARCH or kind == "float32" or not blocks.capacity:
        return False
    if blocks.rows != blocks.cols or blocks.rows not in SIZES:
        return False
    if not problem.depth or not blocks.grid_rows or not blocks.grid_cols:
        return False
    if hopper.is_across(problem.a) is None or hopper.is_across(problem.b) is None:
        return False
    slots_apart = blocks.capacity > 1 and problem.values.slot != blocks.rows * blocks.cols
    if slots_apart or problem.values.row != blocks.cols or not sampled.stores(problem):
        return False
    given = (
        (problem.a, sampled_hopper.left_extent(problem)),
        (problem.b, sampled_hopper.right_extent(problem)),
    )
    return all(tma.addressable(kind, t.alignment, extent) for t, extent in given)


def pays(problem: Sdd, multiprocessors: int) -> bool:
    """Whether it takes less time than the other kernels, if all slots hold a block and these lie
    anywhere: not where panels have hardly a block each, and not where there are so few of them that
    most multiprocessors have none."""
    blocks, size = problem.blocks, problem.blocks.rows
    rounds, panels = _rounds(problem, multiprocessors)
    density = blocks.capacity / (blocks.grid_rows * blocks.grid_cols * blocks.heads)
    own = rounds * panels * (EMPTY_PANEL + FULL_PANEL * min(density, 1.0))
    more = 1 + max(problem.depth - 64, 0) / 192
    others = blocks.capacity * problem.batch * OTHERS_BLOCK[size] * more
    return own * multiprocessors <= others * OTHERS_COUNT


def lower(epilogue: tuple[Epilogue, ...], problem: Sdd, arch: str, multiprocessors: int) -> Lowered:
    """The launch of a problem that the kernel takes."""
    own = numbers(problem, multiprocessors)
    sides = [number for side in problem.summands for number in side[:4]]
    pointers = tuple((name, 0) for name in ("a", "b", *LISTS))
    step = Step(
        spec(epilogue, variant(problem)),
        (min(multiprocessors, own[1]), 1),
        parameters(epilogue).pack(*sides, *own, *sampled_hopper.differs(problem)),
        pointers + text.vector_pointers(epilogue) + text.summand_pointers(epilogue),
        text.scalar_count(epilogue),
        sampled_hopper.operand_maps(problem),
    )
    return Lowered((step,))


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    if arch != hopper.ARCH or block[0] != block[1] or block[0] not in SIZES:
        return []
    flags, halves = (False, True), [dtype for dtype in dtypes if dtype != "float32"]
    depths = _depths(len(text.summands(epilogue)))
    return [
        spec(epilogue, Variant(dtype, block[0], *rest))
        for dtype, *rest in product(halves, depths, flags, flags)
    ]


def variant(problem: Sdd) -> Variant:
    """The kernel of a problem that it takes."""
    depth = next(depth for depth in DEPTHS if problem.depth <= depth)
    lines = sampled_hopper.lines_last(problem)
    return Variant(problem.dtype, problem.blocks.rows, depth, *lines)


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, block, depth, left, right = made
    words = ["sdd", f"{block}x{block}", f"depth{depth}"]
    words += ["left_lines"] * left + ["right_lines"] * right
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int BLOCK = {block};
constexpr int DEPTH = {depth};
constexpr bool LEFT_LINES = {str(left).lower()};
constexpr bool RIGHT_LINES = {str(right).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "blocksparse/stationary/stationary.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_stationary",
        THREADS,
        shared_bytes(made),
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def shared_bytes(made: Variant) -> int:
    """Stages, rows of blocks on their way out, of each stage two barriers and what is said of it,
    and what lies in front of whole 1024 bytes."""
    staging = 0 if made.block == 16 else UNIT_ROWS * made.block * 2
    stage = PANEL * made.depth * 2
    stages = (ROOM - staging) // stage
    words = 2 * UNIT_ROWS // made.block + 4
    return stages * (stage + 2 * 8 + 4 * words) + staging + 1024


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: maps, the layout's words, the result, the epilogue's, sizes."""
    before = hopper.SIDE * len(text.summands(epilogue))
    return text.parameters(len(LISTS), f"<{before}{FIXED}", epilogue, maps=2)


def numbers(problem: Sdd, multiprocessors: int) -> list[int]:
    """What the parameter struct holds behind the summands' strides, up to the operands' flags: as
    its second the units."""
    blocks, values, panels = problem.blocks, problem.values, _panels(problem)
    a_unit = panels_a_unit(problem, multiprocessors)
    splits = ceil_div(panels, a_unit)
    return [
        values.batch,
        *(_row_groups(problem) * splits, _groups(problem), splits, panels, a_unit),
        *(blocks.grid_rows, blocks.row_words, blocks.heads, blocks.capacity, problem.batch),
    ]


def panels_a_unit(problem: Sdd, multiprocessors: int) -> int:
    """How many panels a unit has: all, or fewer where there are so few units that some
    multiprocessors had none, or one more than others."""
    panels, row_groups = _panels(problem), _row_groups(problem)
    most = min(panels, max(1, 4 * multiprocessors // row_groups))

    def cost(a_unit: int) -> int:
        units = row_groups * ceil_div(panels, a_unit)
        return ceil_div(units, multiprocessors) * (a_unit + START_PANELS)

    return min((ceil_div(panels, splits) for splits in range(1, most + 1)), key=cost)


def _depths(summands: int) -> tuple[int, ...]:
    """Those of kernels: rows of a that are as deep as 128 leave no registers for the dozen that
    places of summands take."""
    return DEPTHS[:1] if summands else DEPTHS


def _rounds(problem: Sdd, multiprocessors: int) -> tuple[int, int]:
    """How often a multiprocessor takes a unit, and what one costs in panels."""
    a_unit = panels_a_unit(problem, multiprocessors)
    units = _row_groups(problem) * ceil_div(_panels(problem), a_unit)
    return ceil_div(units, multiprocessors), a_unit + START_PANELS


def _groups(problem: Sdd) -> int:
    """Groups of rows of a head."""
    return ceil_div(problem.blocks.rows * problem.blocks.grid_rows, UNIT_ROWS)


def _row_groups(problem: Sdd) -> int:
    """Of all heads and batches."""
    return _groups(problem) * problem.blocks.heads * problem.batch


def _panels(problem: Sdd) -> int:
    return ceil_div(problem.blocks.cols * problem.blocks.grid_cols, PANEL)
