"""What kernels for Hopper share: the ring of stages, the order of tiles, tensors as the copy engine
is told of them, and how long tiles take.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.order import MOST_UNITS, ORDER
from kernlib.families.blocksparse.lowering import summands
from kernlib.families.blocksparse.lowering.problem import Dense, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.kernel import Choice
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.tma import TensorMap

ARCH = "sm_90a"
WARPGROUPS, THREADS = 2, 384
SIZES = (64, 128)  # of blocks
TILE_LINES, ROW = 128, 64
WIDTHS = (256, 128, 64)  # columns of a tile
PIECE_BYTES = 64 * 128
OUT_BYTES = WARPGROUPS * 2 * PIECE_BYTES  # of results on their way out, two pieces a warpgroup
STAGES_BYTES = 192 * 1024  # of all of them
MOST_TILES = 2**31 - 1
LAST_TILES = 2  # of a block, that come by falling length
# Bytes of the stored blocks decide for so few columns. The portable kernel's tiles of 32 lines give
# 4096 lines 128 CTAs, four of which a multiprocessor holds; those of wgmma are 128 lines, so 32.
FEW_COLUMNS = 16
# Microseconds of an H100: of a launch, of a tile's results.
START, STORES = 3.5, {64: 0.5, 128: 1.0, 256: 2.0}
INCLUDES = ("common/math.cuh", "common/hopper.cuh", summands.HEADER)  # in front of the facts
LISTS = ("row_bits", "row_ranks", "col_bits", "order")
FIXED = (
    "u32 tiles",
    "int groups", "int column_tiles",  # tiles of a head's lines, of its columns
    "int units", "int panels", "int last", "int ordered",  # see struct Schedule
    "Grid grid",  # blocks of a head, and words
    "int lines", "int columns",  # of a head's result
    "int dense_heads", "int dense_batches", "int value_batches",  # 0 where one serves all, else 1
)  # fmt: skip


def ring(stage_bytes: int, words: int) -> dict[str, Fact]:
    """Facts of as many stages of a size as there is room for, each with so many words that are said
    of it, beside results on their way out."""
    return {
        "WARPGROUPS": WARPGROUPS,
        "STAGES": STAGES_BYTES // stage_bytes,
        "STAGE_BYTES": stage_bytes,
        "OUT_BYTES": OUT_BYTES,
        "WORDS": words,
    }


def shared_bytes(stage_bytes: int) -> int:
    """Of a kernel with such stages: these, results on their way out, barriers and words that are
    said of stages, and what rows lie apart that begin at whole 1024 bytes for the swizzle."""
    barriers = STAGES_BYTES // stage_bytes * (2 * 8 + 4 * 4) + 16
    return STAGES_BYTES + OUT_BYTES + barriers + 1024


def stage_bytes(columns: int) -> int:
    """What a tile of so many columns takes from L2 for a step of 64 along the depth."""
    return (TILE_LINES + columns) * ROW * 2


SHARED_BYTES = shared_bytes(stage_bytes(WIDTHS[0]))  # of tiles of most columns


def walk(lines: int, transposed: bool) -> dict[str, Fact]:
    """Facts of kernel_sources/blocksparse/lists.cuh, of tiles of 128 lines that have all of the
    depth, by blocks of so many lines of op(S)."""
    return {"TRANSPOSED": transposed, "GROUPS": TILE_LINES // lines, "PARTIAL": False}


def halves(scope) -> list[str]:
    """The half types of a scope, none of another GPU."""
    return [dtype for dtype in scope.dtypes if dtype != "float32" and scope.arch == ARCH]


def is_for_tiles(problem: Spmm, arch: str) -> bool:
    """Whether a problem is one of half types on Hopper, whose result the copy engine writes and
    whose dense operand has lines or columns side by side."""
    if arch != ARCH or problem.dtype == "float32" or not problem.blocks.capacity:
        return False
    if not problem.lines or not problem.columns or tiles_of(problem) > MOST_TILES:
        return False
    if is_across(problem.dense) is None or is_across(problem.out) is None:
        return False
    out = _out(problem)
    # The copy engine writes whole 16 bytes.
    return out.sizes[0] % 8 == 0 and tma.addressable(problem.dtype, problem.out.alignment, out)


def is_for_maps(problem: Spmm, arch: str) -> bool:
    """Whether it is one of blocks of 64 and 128, whose operands the copy engine reads too."""
    blocks, values = problem.blocks, problem.values
    if blocks.rows not in SIZES or blocks.cols not in SIZES or not is_for_tiles(problem, arch):
        return False
    kind, dense = problem.dtype, problem.dense
    return (
        values.column == 1
        and tma.addressable(kind, dense.alignment, dense_extent(problem))
        and tma.addressable(kind, values.alignment, values_extent(problem))
    )


def microseconds(problem: Spmm, step: float, width: int, multiprocessors: int) -> float:
    """What a kernel of tiles of so many columns takes by rule, with so many microseconds for a step
    of 64 along the depth; infinite for few columns."""
    if problem.columns <= FEW_COLUMNS:
        return inf
    op, tiles = problem.op, tiles_of(problem, width)
    stored = op.grid_cols * op.filled(TILE_LINES // op.rows)
    stored = max(stored, min(1.0, multiprocessors / tiles))  # one tile at least has a block
    rounds = max(1.0, tiles / multiprocessors + 0.5)
    return START + rounds * (STORES[width] + stored * op.cols / ROW * step)


def fewest_rounds(
    choices: list[Choice], tiles: Callable[[Choice], tuple[int, int]], multiprocessors: int
) -> Choice:
    """The first of the choices whose tiles take the least time: their number is rounded up to whole
    rounds on all multiprocessors, and each round takes what one tile does. ``tiles`` says of a
    choice how many there are, and the time of one, in any unit."""

    def cost(choice: Choice) -> int:
        count, time = tiles(choice)
        return ceil_div(count, multiprocessors) * time

    return min(choices, key=cost)


def widths(problem: Spmm, among: tuple[int, ...]) -> list[Choice]:
    """The columns of a tile, most first: no more than twice as many as the problem has."""
    few = [width for width in among if width < 2 * problem.columns] or among[-1:]
    return [{"columns": width} for width in few if tiles_of(problem, width) <= MOST_TILES]


def best_width(problem: Spmm, choices: list[Choice], multiprocessors: int) -> Choice:
    """Of the choices of columns the one taken untuned. The fewest that hold all columns, as those
    that do not exist are multiplied too, or 256, which bring most sums for what they take from L2;
    fewer where tiles are so few that more of them, on more multiprocessors, take less by one of
    these."""

    def tiles(choice: Choice) -> tuple[int, int]:
        width = int(choice["columns"])
        return tiles_of(problem, width), stage_bytes(width)

    return fewest_rounds(choices, tiles, multiprocessors)


def launch(
    epilogue: tuple[Epilogue, ...],
    problem: Spmm,
    kernel: KernelSpec,
    fixed: bytes,
    names: tuple[str, ...],
    maps: tuple[TensorMap, ...],
    multiprocessors: int,
    width: int = WIDTHS[0],
    behind: tuple[str, ...] = (),
) -> Lowered:
    """A persistent launch, behind that of the order of its tiles where these are many; ``names``
    are those of maps and operands in front of the lists, ``width`` a tile's columns, and ``behind``
    what comes after the lists."""
    grid = min(multiprocessors, tiles_of(problem, width))
    ordered = is_ordered(problem, multiprocessors, width)
    pointers = (
        *((name, 0) for name in names),
        *lists(ordered),
        *text.pointers(behind, epilogue),
    )
    scalars = text.scalar_count(epilogue)
    main = Step(kernel, (grid, 1), fixed, pointers, scalars, maps, overlaps=ordered)
    if not ordered:
        return Lowered((main,))
    order = ORDER.step(units_of(problem), problem, grid)
    return Lowered((order, main), ORDER.workspace(problem))


def lists(ordered: bool) -> tuple[tuple[str, int], ...]:
    """The pointers of LISTS. Without an order nothing is read of what stands for it."""
    order = (WORKSPACE if ordered else LISTS[0], 0)
    return *((name, 0) for name in LISTS[:-1]), order


def is_ordered(problem: Spmm, multiprocessors: int, width: int = WIDTHS[0]) -> bool:
    """Whether blocks take tiles from a counter, the longest first: of more tiles than blocks."""
    return tiles_of(problem, width) > multiprocessors and units_of(problem) <= MOST_UNITS


def out_map(problem: Spmm) -> TensorMap:
    """The map of the result, written by boxes of 64 x 64."""
    return tma.tensor_map(problem.dtype, _out(problem), (ROW, ROW, 1, 1))


def operand_maps(problem: Spmm, rows: int) -> tuple[TensorMap, ...]:
    """Of the stored blocks, the dense operand by boxes of so many rows, and the result."""
    kind = problem.dtype
    return (
        tma.tensor_map(kind, values_extent(problem), (ROW, ROW, 1, 1)),
        tma.tensor_map(kind, dense_extent(problem), (ROW, rows, 1, 1)),
        out_map(problem),
    )


def fields(epilogue: tuple[Epilogue, ...], *strides: str) -> Fields:
    """Struct Fixed, with members for strides of a kernel's own."""
    return Fields((*summands.members(epilogue), *strides, *FIXED))


def numbers(problem: Spmm, multiprocessors: int, width: int = WIDTHS[0]) -> dict:
    """The values of struct Fixed, of tiles of so many columns."""
    op, dense, values = problem.op, problem.dense, problem.values
    column_tiles = ceil_div(problem.columns, width)
    units, panels = units_of(problem), column_tiles * problem.batch
    return {
        **summands.values(problem.summands),
        "tiles": tiles_of(problem, width),
        "groups": ceil_div(problem.lines, TILE_LINES),
        "column_tiles": column_tiles,
        "units": units,
        "panels": panels,
        "last": min(panels, ceil_div(LAST_TILES * multiprocessors, units)),
        "ordered": int(is_ordered(problem, multiprocessors, width)),
        "grid": (op.grid_rows, op.grid_cols, op.row_words, problem.blocks.row_words),
        "lines": problem.lines,
        "columns": problem.columns,
        "dense_heads": int(dense.head > 0),
        "dense_batches": int(dense.batch > 0),
        "value_batches": int(values.batch > 0),
    }


def units_of(problem: Spmm) -> int:
    """Groups of lines of all heads."""
    return ceil_div(problem.lines, TILE_LINES) * problem.blocks.heads


def tiles_of(problem: Spmm, width: int = WIDTHS[0]) -> int:
    return units_of(problem) * ceil_div(problem.columns, width) * problem.batch


def is_across(t: Dense) -> bool | None:
    """Whether the lines of an operand lie side by side; None where neither they nor columns do."""
    return True if t.line == 1 else False if t.column == 1 else None


# Tensors as the copy engine is told of them: what serves all heads or batches is one.


def values_extent(problem: Spmm) -> tma.Extent:
    blocks, values = problem.blocks, problem.values
    batch = problem.batch if values.batch else 1
    sizes = (blocks.cols, blocks.rows, blocks.capacity, batch)
    return tma.Extent(sizes, (values.row, values.slot, values.batch))


def dense_extent(problem: Spmm) -> tma.Extent:
    return _extent(problem, problem.dense, problem.op.cols * problem.op.grid_cols)


def _out(problem: Spmm) -> tma.Extent:
    return _extent(problem, problem.out, problem.lines)


def _extent(problem: Spmm, t: Dense, lines: int) -> tma.Extent:
    heads = problem.blocks.heads if t.head else 1
    batch = problem.batch if t.batch else 1
    ends, steps = (problem.columns, lines), t.line
    if is_across(t):
        ends, steps = (lines, problem.columns), t.column
    return tma.Extent((*ends, heads, batch), (steps, t.head, t.batch))
