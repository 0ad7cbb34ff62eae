"""The kernel of kernel_sources/blocksparse/hopper/hopper.cuh: products with blocks of 64 and 128 in
half types.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels import portable
from kernlib.families.blocksparse.lowering import order, times
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Spmm
from kernlib.families.blocksparse.lowering.times import fewest_rounds
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

KIND = "hopper"
ARCH = "sm_90a"
THREADS = 384
SIZES = (64, 128)  # of blocks
TILE_LINES, ROW = 128, 64
WIDTHS = (256, 128, 64)  # columns of a tile
OUT_PARTS, PIECE_BYTES = 2, 64 * 128
STAGES_BYTES = 192 * 1024  # of all of them
MOST_TILES = 2**31 - 1
LAST_TILES = 2  # of a block, that come by falling length
# Bytes of the stored blocks decide for so few columns. The portable kernel's tiles of 32 lines give
# 4096 lines 128 CTAs, four of which a multiprocessor holds; those of wgmma are 128 lines, so 32.
FEW_COLUMNS = 16
# Microseconds of an H100: of a launch, of a tile's results, of a step of 64 along the depth.
START, STORES = 3.5, {64: 0.5, 128: 1.0, 256: 2.0}
STEPS = {64: 0.5, 128: 0.6, 256: 0.95}
LISTS = ("row_bits", "row_ranks", "col_bits", "order")
SIDE = "4q"  # struct Side
FIXED = "I15i"  # struct Fixed


def shared_bytes(stage_bytes: int) -> int:
    """Of a kernel with such stages: these, results on their way out, barriers and words that are
    said of stages, and what rows lie apart that begin at whole 1024 bytes for the swizzle."""
    barriers = STAGES_BYTES // stage_bytes * (2 * 8 + 4 * 4) + 16
    return STAGES_BYTES + 2 * OUT_PARTS * PIECE_BYTES + barriers + 1024


def stage_bytes(columns: int) -> int:
    """What a tile of so many columns takes from L2 for a step of 64 along the depth."""
    return (TILE_LINES + columns) * ROW * 2


SHARED_BYTES = shared_bytes(stage_bytes(WIDTHS[0]))  # of tiles of most columns


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    lines: int  # of a block of op(S)
    depth: int
    columns: int  # of a tile
    transposed: bool
    depth_last: bool
    lines_last: bool


def takes(problem: Spmm, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    blocks, values = problem.blocks, problem.values
    if blocks.rows not in SIZES or blocks.cols not in SIZES:
        return False
    if not is_for_tiles(problem, arch):
        return False
    kind, dense = problem.dtype, problem.dense
    return (
        values.column == 1
        and tma.addressable(kind, dense.alignment, dense_extent(problem))
        and tma.addressable(kind, values.alignment, values_extent(problem))
    )


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


def pays(problem: Spmm, multiprocessors: int) -> bool:
    """Whether columns are so many, and tiles, that it takes less time than the portable kernel."""
    known = candidates(problem, ARCH)
    width = int(default(problem, known, multiprocessors)["columns"])
    return is_faster(problem, STEPS[width], width, multiprocessors)


def is_faster(problem: Spmm, step: float, width: int, multiprocessors: int) -> bool:
    """Whether a kernel of tiles of so many columns, with so many microseconds for a step of 64
    along the depth, takes less time by rule than the portable kernel."""
    if problem.columns <= FEW_COLUMNS:
        return False
    blocks, tiles = problem.blocks, tiles_of(problem, width)
    lines, depth = (blocks.cols, blocks.rows) if problem.transposed else blocks[:2]
    stored = portable.depth_blocks(problem) * times.filled(blocks.density, TILE_LINES // lines)
    stored = max(stored, min(1.0, multiprocessors / tiles))  # one tile at least has a block
    rounds = max(1.0, tiles / multiprocessors + 0.5)
    own = START + rounds * (STORES[width] + stored * depth / ROW * step)
    return own <= portable.best_microseconds(problem, ARCH, multiprocessors)


def candidates(problem: Spmm, arch: str) -> list[Choice]:
    """The columns of a tile, most first: no more than twice as many as the problem has."""
    known = [width for width in WIDTHS if width < 2 * problem.columns] or WIDTHS[-1:]
    return [{"columns": width} for width in known if tiles_of(problem, width) <= MOST_TILES]


def default(problem: Spmm, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned. The fewest that hold all columns, as those that do
    not exist are multiplied too, or 256, which bring most sums for what they take from L2; fewer
    where tiles are so few that more of them, on more multiprocessors, take less by one of these."""

    def tiles(choice: Choice) -> tuple[int, int]:
        width = int(choice["columns"])
        return tiles_of(problem, width), stage_bytes(width)

    return fewest_rounds(known, tiles, multiprocessors)


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Spmm,
    arch: str,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem that the kernel takes, with the columns of ``choice``, one of
    :func:`candidates`."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    width = int(choice["columns"])
    made = variant(problem, width)
    maps = (
        tma.tensor_map(problem.dtype, values_extent(problem), (ROW, ROW, 1, 1)),
        tma.tensor_map(problem.dtype, dense_extent(problem), (ROW, _box(made), 1, 1)),
        out_map(problem),
    )
    own = numbers(problem, multiprocessors, width)
    fixed = parameters(epilogue).pack(*sides(problem), *own)
    names, kernel = ("values", "dense", "out"), spec(epilogue, made)
    return launch(epilogue, problem, kernel, fixed, names, maps, multiprocessors, width)


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
    # Without an order nothing is read of what is given for it.
    lists = [(name, 0) for name in LISTS[:-1]]
    lists.append((WORKSPACE if ordered else LISTS[0], 0))
    lists += [(name, 0) for name in behind]
    pointers = (*((name, 0) for name in names), *lists, *text.vector_pointers(epilogue))
    pointers += text.summand_pointers(epilogue)
    scalars = text.scalar_count(epilogue)
    main = Step(kernel, (grid, 1), fixed, pointers, scalars, maps, overlaps=ordered)
    if not ordered:
        return Lowered((main,))
    return Lowered((order.step(_units(problem), problem, grid), main), order.workspace(problem))


def is_ordered(problem: Spmm, multiprocessors: int, width: int = WIDTHS[0]) -> bool:
    """Whether blocks take tiles from a counter, the longest first: of more tiles than blocks."""
    return tiles_of(problem, width) > multiprocessors and _units(problem) <= order.MOST_UNITS


def out_map(problem: Spmm) -> TensorMap:
    """The map of the result, written by boxes of 64 x 64."""
    return tma.tensor_map(problem.dtype, _out(problem), (ROW, ROW, 1, 1))


def sides(problem: Spmm) -> list[int]:
    """Strides of the summands, each struct Side."""
    return [
        number
        for side in problem.summands
        for number in (side.batch, side.head, side.line, side.column)
    ]


def numbers(problem: Spmm, multiprocessors: int, width: int = WIDTHS[0]) -> tuple[int, ...]:
    """Struct Fixed, of tiles of so many columns."""
    blocks, dense, values = problem.blocks, problem.dense, problem.values
    grid, words = (blocks.grid_rows, blocks.grid_cols), blocks.row_words
    if problem.transposed:
        grid, words = grid[::-1], blocks.col_words
    column_tiles = ceil_div(problem.columns, width)
    units, panels = _units(problem), column_tiles * problem.batch
    return (
        tiles_of(problem, width),
        *(ceil_div(problem.lines, TILE_LINES), column_tiles),
        *(units, panels, min(panels, ceil_div(LAST_TILES * multiprocessors, units))),
        int(is_ordered(problem, multiprocessors, width)),
        *(*grid, words, blocks.row_words),
        *(problem.lines, problem.columns),
        *(int(dense.head > 0), int(dense.batch > 0), int(values.batch > 0)),
    )


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    if arch != ARCH or not set(block) <= set(SIZES):
        return []
    flags, halves = (False, True), [dtype for dtype in dtypes if dtype != "float32"]
    return order.variants(block) + [
        spec(epilogue, Variant(dtype, *(block[::-1] if ends[0] else block), width, *ends))
        for dtype, width, *ends in product(halves, WIDTHS, flags, flags, flags)
    ]


def variant(problem: Spmm, width: int) -> Variant:
    """The kernel of a problem that it takes, with tiles of so many columns."""
    sizes = problem.blocks.rows, problem.blocks.cols
    lines, depth = sizes[::-1] if problem.transposed else sizes
    deep, across = is_across(problem.dense), is_across(problem.out)
    ends = problem.transposed, bool(deep), bool(across)
    return Variant(problem.dtype, lines, depth, width, *ends)


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, lines, depth, columns, transposed, depth_last, lines_last = made
    words = [f"{lines}x{depth}", f"{TILE_LINES}x{columns}"] + ["transposed"] * transposed
    words += ["depth_last"] * depth_last + ["lines_last"] * lines_last
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int LINES = {lines};
constexpr int DEPTH = {depth};
constexpr int TILE_COLUMNS = {columns};
constexpr bool TRANSPOSED = {str(transposed).lower()};
constexpr bool DEPTH_LAST = {str(depth_last).lower()};
constexpr bool LINES_LAST = {str(lines_last).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "common/hopper.cuh"

{multiply(dtype, columns, False, transposed, not depth_last)}
#include "blocksparse/hopper/hopper.cuh"
"""
    made = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_hopper",
        THREADS,
        shared_bytes(stage_bytes(columns)),
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(made, dtype, *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: maps, the layout's bits and ranks, the epilogue's, sizes."""
    before = SIDE * len(text.summands(epilogue))
    return text.parameters(len(LISTS), f"<{before}{FIXED}", epilogue, maps=3)


def _units(problem: Spmm) -> int:
    """Groups of lines of all heads."""
    return ceil_div(problem.lines, TILE_LINES) * problem.blocks.heads


def tiles_of(problem: Spmm, width: int = WIDTHS[0]) -> int:
    return _units(problem) * ceil_div(problem.columns, width) * problem.batch


def _box(made: Variant) -> int:
    """Rows of the box of a panel: its columns, or as many of the depth as a stage has."""
    return made.columns if made.depth_last else ROW


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
    blocks: Blocks = problem.blocks
    depth = blocks.rows * blocks.grid_rows if problem.transposed else blocks.cols * blocks.grid_cols
    return _extent(problem, problem.dense, depth)


def _out(problem: Spmm) -> tma.Extent:
    return _extent(problem, problem.out, problem.lines)


def _extent(problem: Spmm, t: Dense, lines: int) -> tma.Extent:
    heads = problem.blocks.heads if t.head else 1
    batch = problem.batch if t.batch else 1
    ends, steps = (problem.columns, lines), t.line
    if is_across(t):
        ends, steps = (lines, problem.columns), t.column
    return tma.Extent((*ends, heads, batch), (steps, t.head, t.batch))
