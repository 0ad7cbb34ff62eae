"""The kernel of kernel_sources/blocksparse/attention/portable/portable.cuh: attention by mma.sync,
on every GPU, for every problem of half types.

A block of threads takes 64 or 128 rows of a head, and walks over tiles of 32 or 64 columns: the
larger ones reuse more of what comes from device memory, the smaller ones need fewer registers, less
shared memory and fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import Attention, Operand, Score
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.records import NamedTuple

KIND = "portable"
FAMILY = "blocksparse"
HALVES = ("float16", "bfloat16")
SIDES = (16, 32, 64, 128)  # of blocks
WIDTHS = tuple(range(16, 257, 16))  # of rows of q, k and v, with zeros behind them
CHUNK = 8  # elements of 16 bytes
MOST_CTAS = 2**31 - 1
WARPS = 4
STRIDES, SIZES = "3q", "14i"  # structs of parameters.cuh
NAMES = ("row_bits", "q", "k", "v", "out", "lse", "rest")


class Tile(NamedTuple):
    """Rows and columns of a tile, and blocks of threads that share a multiprocessor."""

    rows: int
    columns: int
    blocks: int


class Variant(NamedTuple):
    """Everything that code generation chooses besides the score."""

    dtype: str
    block: tuple[int, int]
    features: int  # multiples of 16
    values: int
    tile: Tile


def takes(problem: Attention, arch: str) -> bool:
    """Whether the kernel computes a problem: all of half types whose rows are whole 16 bytes."""
    operands = (problem.q, problem.k, problem.v, problem.out)
    return (
        problem.dtype in HALVES
        and all(side in SIDES for side in problem.blocks[:2])
        and all(16 <= width <= 256 and width % CHUNK == 0 for width in problem[7:9])
        and max(problem.queries, problem.keys) <= text.WIDEST
        and all(is_whole(operand) for operand in operands)
    )


def is_whole(operand: Operand) -> bool:
    """Whether rows take copies of 16 bytes."""
    return operand.alignment % 16 == 0 and not any(stride % CHUNK for stride in operand[:3])


def candidates(problem: Attention, arch: str) -> list[Choice]:
    """The tiles of a problem, most rows first."""
    return [{"rows": tile.rows} for tile in tiles(problem.score, *widths(problem), arch)]


def default(problem: Attention, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: the largest that gives each multiprocessor a tile,
    and has no more rows than there are."""
    heads = problem.batch * problem.heads
    for choice in known[:-1]:
        count = heads * problem.row_tiles(int(choice["rows"]))
        if count >= multiprocessors and problem.queries > int(known[-1]["rows"]):
            return choice
    return known[-1]


def lower(
    problem: Attention, arch: str, multiprocessors: int, choice: Choice | None = None
) -> Lowered:
    """The launch of a problem that :func:`takes` says yes to, by ``choice``, one of
    :func:`candidates`. Raises UnsupportedError for sizes that no grid can hold."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    known = {tile.rows: tile for tile in tiles(problem.score, *widths(problem), arch)}
    tile = known[int(choice["rows"])]
    made = Variant(problem.dtype, problem.blocks[:2], *widths(problem), tile)
    numbers = text.views(problem)
    for operand in (problem.q, problem.k, problem.v, problem.out):
        numbers += operand[:3]
    numbers += sizes(problem, problem.row_tiles(tile.rows))
    pointers = tuple((name, 0) for name in (*NAMES, *text.pointers(problem.score)))
    fixed = parameters(problem.score).pack(*numbers)
    count = grid(problem.batch * problem.heads * problem.row_tiles(tile.rows))
    step = Step(spec(problem.score, made, arch), (count, 1), fixed, pointers, len(text.SCALARS))
    return Lowered((step,))


def widths(problem: Attention) -> tuple[int, int]:
    """Of rows of q and k, and of v, in shared memory."""
    return round_up(problem.features, 16), round_up(problem.values, 16)


def tiles(score: Score, features: int, values: int, arch: str) -> list[Tile]:
    """Those that a GPU has shared memory and registers for, most rows first. 32 rows a warp hold
    the sums of 128 values at most, of 64 beside the text of a score; and of more than 32 the logits
    of 64 columns where there is neither a score nor a dropout."""
    width = max(features, values)
    is_plain = not (score.text or score.dropout)
    wide = width <= 32 or (width <= 64 and is_plain)
    large = [Tile(128, 64 if wide else 32, 2)] if width <= (64 if score.text else 128) else []
    small = [Tile(64, 64, 2)] if width <= 128 else [Tile(64, 32, 1)]
    found = [*large, *small]
    return [t for t in found if shared_bytes(features, values, t) <= targets.SHARED_BYTES[arch]]


def grid(count: int) -> int:
    """So many blocks of threads, one if there are none. Raises UnsupportedError for too many."""
    if count > MOST_CTAS:
        raise UnsupportedError(
            f"attention of so many heads and rows has {count} tiles, more than the {MOST_CTAS} of "
            "a launch: give parts of the batch"
        )
    return max(1, count)


def sizes(problem: Attention, tiles: int) -> list[int]:
    """Struct Sizes, of so many tiles of a head."""
    blocks = problem.blocks
    return [
        problem.batch, problem.heads, problem.group, problem.queries, problem.keys,
        blocks.grid_rows, blocks.row_words, blocks.grid_cols, blocks.col_words,
        problem.layout_batch, problem.layout_head,
        problem.features // CHUNK, problem.values // CHUNK, max(1, tiles),
    ]  # fmt: skip


def spec(score: Score, made: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    (rows, cols), tile = made.block, made.tile
    said = [f"{rows}x{cols}", f"{made.features}/{made.values}", f"{tile.rows} rows"]
    said += text.words(score)
    source = f"""{text.preamble(made.dtype, score)}
constexpr int WARPS = {WARPS};
constexpr int FRAGMENTS = {tile.rows // WARPS // 16};
constexpr int TILE_COLS = {tile.columns};
constexpr int BLOCK_ROWS = {rows};
constexpr int BLOCK_COLS = {cols};
constexpr int FEATURES = {made.features};
constexpr int VALUES = {made.values};
constexpr int MIN_BLOCKS = {tile.blocks};
constexpr int PARAMETER_BYTES = {parameters(score).size};

#include "blocksparse/attention/portable/portable.cuh"
"""
    shared = shared_bytes(made.features, made.values, tile)
    description = " ".join(["blocksparse attention", KIND, made.dtype, *said])
    found = KernelSpec(FAMILY, source, "blocksparse_attention", 32 * WARPS, shared)
    return named(found._replace(description=description), KIND, made.dtype, *said)


def pitch(width: int) -> int:
    """Bytes of a row in shared memory."""
    return 2 * width + 16


def shared_bytes(features: int, values: int, tile: Tile) -> int:
    """Rows of q, k and v, or the results that take their place."""
    stages = (tile.rows + tile.columns) * pitch(features) + tile.columns * pitch(values)
    return max(stages, tile.rows * pitch(values))


def parameters(score: Score) -> Parameters:
    """The parameter struct."""
    return text.parameters(len(NAMES), STRIDES * 4 + SIZES, score)


def variants(
    score: Score, block: tuple[int, int], dtypes: tuple[str, ...], arch: str, **known: int
) -> Iterator[KernelSpec]:
    """Every spec that :func:`lower` may choose for a layout's blocks, of so many ``features`` and
    ``values`` where these are known."""
    features, values = (
        [round_up(known[name], 16)] if name in known else WIDTHS for name in ("features", "values")
    )
    for dtype, width, height in product(dtypes, features, values):
        if dtype in DTYPES and dtype in HALVES:
            for tile in tiles(score, width, height, arch):
                yield spec(score, Variant(dtype, block, width, height, tile), arch)
