"""The kernel of kernel_sources/blocksparse/sampled_hopper/sampled_hopper.cuh: blocks of 64 and 128
of a product of dense matrices in half types.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels import sampled
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd
from kernlib.families.blocksparse.lowering.times import fewest_rounds
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

KIND = "hopper"
LISTS = ("rows", "cols")
FIXED = "I8i"  # struct Fixed
ROW = hopper.ROW
# Microseconds of an H100: of a launch, of a step of 64 along the depth, of each of its pieces.
START, STEP, STEP_PIECE = 3.0, 0.36, 0.03
PIECES = 4  # of 64 x 64, of rows of a or of columns of b that a stage holds at most


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    rows: int  # of a block
    cols: int
    slots: int  # of a tile
    left_lines: bool
    right_lines: bool


def takes(problem: Sdd, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    blocks, kind = problem.blocks, problem.dtype
    if arch != hopper.ARCH or kind == "float32" or not blocks.capacity or not problem.depth:
        return False
    if blocks.rows not in hopper.SIZES or blocks.cols not in hopper.SIZES:
        return False
    if hopper.is_across(problem.a) is None or hopper.is_across(problem.b) is None:
        return False
    if _tiles(problem, 1) > hopper.MOST_TILES:
        return False
    given = ((problem.a, left_extent(problem)), (problem.b, right_extent(problem)))
    if not all(tma.addressable(kind, t.alignment, extent) for t, extent in given):
        return False
    values = problem.values
    return values.column == 1 and tma.addressable(kind, values.alignment, _values(problem))


def candidates(problem: Sdd, arch: str) -> list[Choice]:
    """The slots of a tile, most first."""
    blocks = problem.blocks
    return [{"slots": slots} for slots in _slots(blocks.rows, blocks.cols)]


def default(problem: Sdd, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: the most slots, which share rows of a, unless there
    are so few that more tiles, on more multiprocessors, take less by one of these. What slots hold
    is not known here: all count."""
    high, wide = problem.blocks.rows // ROW, problem.blocks.cols // ROW

    def tiles(choice: Choice) -> tuple[int, int]:
        slots = int(choice["slots"])
        return _tiles(problem, slots), high + slots * wide  # pieces from L2, of slots of one line

    return fewest_rounds(known, tiles, multiprocessors)


def pays(problem: Sdd, multiprocessors: int) -> bool:
    """Whether it takes less time by rule than the kernel for every GPU, which can share sums."""
    high, wide = problem.blocks.rows // ROW, problem.blocks.cols // ROW
    slots = int(default(problem, candidates(problem, hopper.ARCH), multiprocessors)["slots"])
    rounds = ceil_div(_tiles(problem, slots), multiprocessors)
    step = STEP + STEP_PIECE * (high + slots * wide)
    own = START + rounds * ceil_div(problem.depth, ROW) * step
    return own <= sampled.best_microseconds(problem, hopper.ARCH, multiprocessors)


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Sdd,
    arch: str,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem that the kernel takes, with the slots of ``choice``, one of
    :func:`candidates`."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    slots = int(choice["slots"])
    tiles = _tiles(problem, slots)
    out = tma.tensor_map(problem.dtype, _values(problem), (ROW, ROW, 1, 1))
    sides = [
        number
        for side in problem.summands
        for number in (side.batch, side.slot, side.row, side.column)
    ]
    numbers = (
        *(tiles, tiles // problem.batch),
        ceil_div(problem.depth, ROW),
        problem.blocks.capacity,
        problem.blocks.grid_rows,
        *differs(problem),
    )
    pointers = tuple((name, 0) for name in ("a", "b", "out", *LISTS))
    step = Step(
        spec(epilogue, variant(problem, slots)),
        (min(multiprocessors, tiles), 1),
        parameters(epilogue).pack(*sides, *numbers),
        pointers + text.vector_pointers(epilogue) + text.summand_pointers(epilogue),
        text.scalar_count(epilogue),
        (*operand_maps(problem), out),
    )
    return Lowered((step,))


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    if arch != hopper.ARCH or not set(block) <= set(hopper.SIZES):
        return []
    flags, halves = (False, True), [dtype for dtype in dtypes if dtype != "float32"]
    return [
        spec(epilogue, Variant(dtype, *block, *rest))
        for dtype, *rest in product(halves, _slots(*block), flags, flags)
    ]


def variant(problem: Sdd, slots: int) -> Variant:
    """The kernel of a problem that it takes, with tiles of so many slots."""
    blocks = problem.blocks
    return Variant(problem.dtype, blocks.rows, blocks.cols, slots, *lines_last(problem))


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, rows, cols, slots, left, right = made
    words = ["sdd", f"{rows}x{cols}", f"{slots}slots"]
    words += ["left_lines"] * left + ["right_lines"] * right
    stage_bytes = slots * (rows + cols) * ROW * 2
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int ROWS = {rows};
constexpr int COLS = {cols};
constexpr int SLOTS = {slots};
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
        hopper.shared_bytes(stage_bytes),
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: maps, the layout's slots, the epilogue's, sizes."""
    before = hopper.SIDE * len(text.summands(epilogue))
    return text.parameters(len(LISTS), f"<{before}{FIXED}", epilogue, maps=3)


def _slots(rows: int, cols: int) -> list[int]:
    """Those of a tile, most first: as many as a stage has room for."""
    return [slots for slots in (4, 2, 1) if slots * max(rows, cols) <= PIECES * ROW]


def _tiles(problem: Sdd, slots: int) -> int:
    return ceil_div(problem.blocks.capacity, slots) * problem.batch


def lines_last(problem: Sdd) -> tuple[bool, bool]:
    """Whether a has its rows side by side, and b its columns; where the depth is, they are not."""
    return bool(hopper.is_across(problem.a)), not hopper.is_across(problem.b)


# Tensors as the copy engine is told of them: what serves all heads or batches is one.


def operand_maps(problem: Sdd) -> tuple[tma.TensorMap, ...]:
    """Of a and b, which are read by boxes of 64 x 64."""
    left, right = left_extent(problem), right_extent(problem)
    return tuple(
        tma.tensor_map(problem.dtype, extent, (ROW, ROW, 1, 1)) for extent in (left, right)
    )


def differs(problem: Sdd) -> tuple[int, ...]:
    """Whether heads and batches of a, and of b, each have their own: 0 or 1."""
    return tuple(int(n > 0) for t in (problem.a, problem.b) for n in (t.head, t.batch))


def left_extent(problem: Sdd) -> tma.Extent:
    """Of a."""
    blocks = problem.blocks
    return _extent(problem, problem.a, blocks.rows * blocks.grid_rows, problem.depth)


def right_extent(problem: Sdd) -> tma.Extent:
    """Of b."""
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
