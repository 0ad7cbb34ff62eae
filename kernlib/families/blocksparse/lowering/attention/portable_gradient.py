"""The kernel of kernel_sources/blocksparse/attention/portable_gradient/portable_gradient.cuh:
gradients of attention by mma.sync, on every GPU, for every problem of half types.

Three launches share a workspace: what rows are relative to (deltas), then dq by rows of the matrix,
and dk and dv by its columns. Captured tensors with rows have their gradient from the one by rows,
those of columns alone from that by columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kernlib.families.blocksparse.lowering.attention import deltas, portable
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Collected,
    Score,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.records import NamedTuple

KIND = "portable"
WARPS = 4
LINES = 16 * WARPS  # of a block of threads
MOST_SUMS = 256  # of dk and dv together, of each of a warp's 16 lines: half of its registers
NAMES = ("q", "k", "v", "grad", "lse", "rest", WORKSPACE)  # behind the layout's bits
BY_ROWS, BY_COLUMNS = ("row", "pair"), ("col",)
# Columns of 64 rows whose pairs one block of threads sums up batch after batch: of the blocks that
# are under way the sums, 128 KiB each, stay in a cache of 50 MB.
SHARE = 512
MOST_SHARES = 65535  # a grid's second dimension


class Tile(NamedTuple):
    """Of the tiles that lines walk over: their depth, and how many are under way."""

    depth: int
    stages: int


# Deepest first: what there is room for decides. Two under way hide the copies of one.
TILES = (Tile(64, 2), Tile(32, 2), Tile(32, 1), Tile(16, 1))
DEEP_WIDTH = 64  # up to which tiles of 64 leave registers for sums


class Variant(NamedTuple):
    """Everything that code generation chooses besides the score."""

    dtype: str
    block: tuple[int, int]
    turned: bool  # by columns
    features: int  # multiples of 16
    values: int
    needs: tuple[bool, bool]  # dq or dk, and dv
    tile: Tile
    collected: tuple[tuple[int, bool], ...] = ()  # captured tensors, and whether they are of pairs
    summed: bool = False  # whether some of these are summed over batches or heads
    shared: bool = False  # whether blocks of threads share the tiles of a line, of pairs alone

    @property
    def parts(self) -> int:
        """Blocks of threads that share the sums of a tile of lines."""
        return ceil_div(self.features * self.needs[0] + self.values * self.needs[1], MOST_SUMS) or 1


def takes(problem: AttentionGradient, arch: str) -> bool:
    """Whether the kernel computes a problem: what the one of its attention computes."""
    others = (problem.grad, problem.dq, problem.dk, problem.dv)
    return portable.takes(problem.attention, arch) and all(map(portable.is_whole, others))


def candidates(problem: AttentionGradient, arch: str) -> list[Choice]:
    """The depths of tiles, by preference."""
    return [{"depth": tile.depth, "stages": tile.stages} for tile in tiles(problem, arch)]


def default(problem: AttentionGradient, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned."""
    return known[0]


def lower(
    problem: AttentionGradient, arch: str, multiprocessors: int, choice: Choice | None = None
) -> Lowered:
    """The launches of a problem that :func:`takes` says yes to, by ``choice``, one of
    :func:`candidates`. Raises UnsupportedError for sizes that no grid can hold."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    tile = Tile(int(choice["depth"]), int(choice["stages"]))
    wanted, rows = tuple(enumerate(problem.collected)), deltas.rows_of(problem)
    steps = _steps(problem, problem.needs, tile, wanted, rows)
    return Lowered((deltas.step(problem), *steps), deltas.nbytes(problem))


def collecting(
    problem: AttentionGradient,
    arch: str,
    wanted: tuple[tuple[int, Collected], ...],
    delta_rows: int,
) -> tuple[Step, ...]:
    """The launches that leave the gradients by captured tensors, those ``wanted`` with their places
    among all of them, and nothing else: two products an element, and one launch an axis. Deltas lie
    at the beginning of the workspace, so many of each head."""
    tile = tiles(problem, arch)[0]
    return _steps(problem, (False, False, False), tile, wanted, delta_rows)


def _steps(
    problem: AttentionGradient,
    needs: tuple[bool, bool, bool],
    tile: Tile,
    wanted: tuple[tuple[int, Collected], ...],
    delta_rows: int,
) -> tuple[Step, ...]:
    """The launches by rows and by columns of what is needed and wanted."""
    of_rows, of_columns = (
        tuple(each for each in wanted if each[1].axes in kinds) for kinds in (BY_ROWS, BY_COLUMNS)
    )
    needs_q, *others = needs
    steps = []
    if needs_q or of_rows:
        steps.append(_step(problem, False, (needs_q, False), tile, of_rows, delta_rows))
    if any(others) or of_columns:
        steps.append(_step(problem, True, tuple(others), tile, of_columns, delta_rows))
    return tuple(steps)


def together(problem: AttentionGradient, own: tuple[tuple[int, Collected], ...]) -> tuple[int, int]:
    """Batches and heads that a block of threads takes one after the other: all of those over which
    a captured tensor's gradient is summed, else one."""
    attention, views = problem.attention, [each.strides for _, each in own]
    return (
        1 if all(view.batch for view in views) else max(1, attention.batch),
        1 if all(view.head for view in views) else max(1, attention.heads),
    )


def tiles(problem: AttentionGradient, arch: str) -> list[Tile]:
    """Those that a GPU has shared memory and registers for."""
    return _tiles(*portable.widths(problem.attention), arch)


def _tiles(features: int, values: int, arch: str) -> list[Tile]:
    most = 64 if max(features, values) <= DEEP_WIDTH else 32
    room = targets.SHARED_BYTES[arch]
    fitting = (tile for tile in TILES if shared_bytes(features, values, tile) <= room)
    return [tile for tile in fitting if tile.depth <= most]


def _step(
    problem: AttentionGradient,
    turned: bool,
    needs: tuple[bool, bool],
    tile: Tile,
    own: tuple[tuple[int, Collected], ...],
    delta_rows: int,
) -> Step:
    """The launch by rows or, ``turned``, by columns."""
    attention = problem.attention
    kept = tuple((each.index, each.axes == "pair") for _, each in own)
    kind = attention.dtype, attention.blocks[:2], turned
    batches, of_cta = (1, 1) if turned else together(problem, own)
    summed = batches * of_cta > 1
    shared = summed and not any(needs) and all(is_pair for _, is_pair in kept)
    share = SHARE * ceil_div(attention.keys, SHARE * MOST_SHARES)
    made = Variant(*kind, *portable.widths(attention), needs, tile, kept, summed, shared)
    results = (("dk", problem.dk), ("dv", problem.dv)) if turned else (("dq", problem.dq),) * 2
    lines, heads = (
        (attention.keys, attention.kv_heads) if turned else (attention.queries, attention.heads)
    )
    count = ceil_div(lines, LINES)
    numbers = text.views(attention)
    for operand in (attention.q, attention.k, attention.v, problem.grad, *(r for _, r in results)):
        numbers += operand[:3]
    numbers += [*portable.sizes(attention, count), batches, of_cta, delta_rows, share]
    numbers += [stride for _, each in own for stride in each.strides]
    # What is not wanted has no tensor: the address of q stands there, and nobody reads it.
    named_results = (name if need else "q" for (name, _), need in zip(results, needs, strict=True))
    names = ["col_bits" if turned else "row_bits", *NAMES, *named_results]
    names += [f"collected{place}" for place, _ in own]
    names += text.pointers(attention.score)
    heads //= of_cta
    parts = ceil_div(attention.keys, share) if shared else made.parts
    grid = portable.grid(attention.batch // max(1, batches) * heads * count), parts
    fixed = parameters(attention.score, len(own)).pack(*numbers)
    pointers = tuple((name, 0) for name in names)
    return Step(spec(attention.score, made), grid, fixed, pointers, len(text.SCALARS))


def spec(score: Score, made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    line, depth = reversed(made.block) if made.turned else made.block
    first, second = (round_up(ceil_div(n, made.parts), 16) for n in (made.features, made.values))
    source = f"""{text.preamble(made.dtype, score)}
constexpr bool TURNED = {text.flag(made.turned)};
constexpr bool NEEDS_FIRST = {text.flag(made.needs[0])};
constexpr bool NEEDS_SECOND = {text.flag(made.needs[1])};
constexpr int WARPS = {WARPS};
constexpr int TILE_DEPTH = {made.tile.depth};
constexpr int STAGES = {made.tile.stages};
constexpr int BLOCK_LINE = {line};
constexpr int BLOCK_DEPTH = {depth};
constexpr int FEATURES = {made.features};
constexpr int VALUES = {made.values};
constexpr int FIRST_PART = {first};
constexpr int SECOND_PART = {second};
{text.collected(made.collected)}
constexpr bool SUMMED = {text.flag(made.summed)};
constexpr bool SHARED = {text.flag(made.shared)};
constexpr int MIN_BLOCKS = {2 if max(made.features, made.values) <= 128 else 1};
constexpr int PARAMETER_BYTES = {parameters(score, len(made.collected)).size};

#include "blocksparse/attention/portable_gradient/portable_gradient.cuh"
"""
    said = _words(score, made)
    description = " ".join(["blocksparse attention gradient", KIND, made.dtype, *said])
    shared = shared_bytes(made.features, made.values, made.tile)
    found = KernelSpec(
        portable.FAMILY, source, "blocksparse_attention_gradient", 32 * WARPS, shared
    )
    return named(found._replace(description=description), KIND, made.dtype, *said)


def _words(score: Score, made: Variant) -> list[str]:
    rows, cols = made.block
    results = ("dk", "dv") if made.turned else ("dq", "")
    found = [f"{rows}x{cols}", f"{made.features}/{made.values}"]
    found += [f"{made.tile.depth} deep", *["1 stage"] * (made.tile.stages == 1)]
    found += [name for name, need in zip(results, made.needs, strict=True) if need]
    found += [f"captured {index}" for index, _ in made.collected] + ["summed"] * made.summed
    found += ["shared"] * made.shared
    return found + text.words(score)


def shared_bytes(features: int, values: int, tile: Tile) -> int:
    """A tile's lines, and stages: of the others' rows and, turned, what is known of these."""
    row = portable.pitch(features) + portable.pitch(values)
    return LINES * row + tile.stages * tile.depth * (row + 3 * 4)


def parameters(score: Score, collected: int) -> Parameters:
    """The parameter struct."""
    fixed = portable.STRIDES * 6 + portable.SIZES + "2i2q" + text.VIEW * collected
    return text.parameters(1 + len(NAMES) + 2 + collected, fixed, score)


def variants(
    score: Score, block: tuple[int, int], dtypes: tuple[str, ...], arch: str, **known: int
) -> Iterator[KernelSpec]:
    """Every spec that :func:`lower` may choose for gradients by q, k and v of a layout's blocks, of
    so many ``features`` and ``values`` where these are known."""
    features, values = (
        [round_up(known[name], 16)] if name in known else portable.WIDTHS
        for name in ("features", "values")
    )
    dtypes = tuple(dtype for dtype in dtypes if dtype in portable.HALVES)
    yield from deltas.variants(dtypes)
    needs = [
        (False, (True, False)),
        *((True, n) for n in ((True, True), (True, False), (False, True))),
    ]
    for dtype, width, height in product(dtypes, features, values):
        for tile, (turned, need) in product(_tiles(width, height, arch), needs):
            yield spec(score, Variant(dtype, block, turned, width, height, need, tile))
