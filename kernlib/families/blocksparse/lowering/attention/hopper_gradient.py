"""The kernels of kernel_sources/blocksparse/attention/hopper_gradient/hopper_gradient.cuh:
gradients of attention by wgmma and tensor maps, for half types on Hopper, values as wide as keys.

First a launch of deltas.py's, then one over the rows of the layout for dq and one over its
columns for dk and dv. These have the gradients by captured tensors too: by rows of each head and by
pairs of a row and a column the first, by columns the second. Pairs that are summed over batches or
heads have a launch of the portable kernel, and nothing else in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kernlib.families.blocksparse.lowering.attention import deltas
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Collected,
    Operand,
    Score,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply
from kernlib.records import NamedTuple

KIND = "hopper"
FAMILY = "blocksparse"
ARCH = "sm_90a"
HALVES = ("float16", "bfloat16")
SIDES = (16, 32, 64, 128)  # of blocks
ROW, HEIGHT = 64, 64  # elements of a line of shared memory; rows of a warpgroup
TILE_ROWS = (128, 64)  # of a CTA
WIDTHS = (32, 64, 80, 96, 128)  # features, with zeros behind them
# By warpgroups that multiply: of one there are two CTAs on a multiprocessor.
SHARED_BYTES = {1: 113 * 1024, 2: 227 * 1024}
MOST_STAGES = 6
REGISTERS = {1: (40, 216), 2: (40, 232)}  # of a producing and of a multiplying thread
# Of one warpgroup that has two results of more than 96 features: 384 bytes were spilled of 216.
WIDE_REGISTERS = 24, 232
# Features up to which two results leave registers for 64 columns beside what captured tensors have
# of these, without the bits of a dropout: 280 to 600 bytes were spilled of 96.
MOST_BESIDE_SUMS = 64
MOST_TILES = 2**31 - 1
FIXED = "6q14i"  # structs Strides and Fixed
OWN = ("first", "second", "row_bits", "deltas", "sums", "rests")


class Variant(NamedTuple):
    """Everything that code generation chooses besides the score. ``block`` are rows and columns of
    one of op(S)."""

    dtype: str
    block: tuple[int, int]
    features: int  # of WIDTHS
    transposed: bool
    columns: int  # of a tile
    early: bool  # whether dv is added to before slopes are made, which takes fewer registers
    rows: int  # of TILE_ROWS
    collected: tuple[tuple[int, bool], ...] = ()  # captured tensors, and whether they are of pairs
    wide_pairs: bool = True  # of which two neighbours are written at once


def takes(problem: AttentionGradient, arch: str) -> bool:
    """Whether the kernels compute a problem."""
    of, shape = problem.attention, problem.attention[2:7]
    return (
        arch == ARCH
        and of.dtype in HALVES
        and all(side in SIDES for side in of.blocks[:2])
        and of.features == of.values
        and 16 <= of.features <= WIDTHS[-1]
        and of.features % 8 == 0
        and min(shape) > 0
        and max(of.queries, of.keys) <= text.WIDEST
        and of.batch * of.heads * ceil_div(deltas.rows_of(problem, has_sums=True), HEIGHT)
        <= MOST_TILES
        and all(is_addressable(problem, name) for name in ("q", "k", "v", "grad"))
        and all(is_whole(t) for t in (of.out, problem.dq, problem.dk, problem.dv))
    )


def candidates(problem: AttentionGradient, arch: str) -> list[Choice]:
    """By rows of a CTA's tile."""
    return [{"rows": rows} for rows in TILE_ROWS]


def default(problem: AttentionGradient, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: 64 rows, of which the fewest lines of blocks share
    what each of them stores. Blocks of 128 too take up to 12 % less time by them, but where nearly
    all are stored up to 5 % more."""
    return next(choice for choice in known if choice["rows"] == TILE_ROWS[-1])


def lower(
    problem: AttentionGradient, arch: str, multiprocessors: int, choice: Choice | None = None
) -> Lowered:
    """The launches of a problem that the kernels take, with the rows of ``choice``, one of
    :func:`candidates`. Raises UnsupportedError for sizes that no grid can hold."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    rows, count = int(choice["rows"]), deltas.rows_of(problem, has_sums=True)
    wanted = tuple(enumerate(problem.collected))
    inside = tuple(each for each in wanted if is_inside(problem, each[1]))
    of_columns = tuple(each for each in inside if each[1].axes == "col")
    of_rows = tuple(each for each in inside if each[1].axes != "col")
    steps = [deltas.step(problem, has_sums=True)]
    if problem.needs[0] or of_rows:
        steps.append(_main(problem, False, rows, of_rows))
    if any(problem.needs[1:]) or of_columns:
        steps.append(_main(problem, True, rows, of_columns))
    apart = tuple(each for each in wanted if each not in inside)
    if apart:  # what these kernels take that one takes too
        from kernlib.families.blocksparse.lowering.attention import (
            portable_gradient,  # which others do without
        )

        steps += portable_gradient.collecting(problem, arch, apart, count)
    numbers = 2 + problem.attention.score.has_score
    return Lowered(tuple(steps), numbers * deltas.nbytes(problem, has_sums=True))


def is_inside(problem: AttentionGradient, collected: Collected) -> bool:
    """Whether the launches that have dq, or dk and dv, have a captured tensor's gradient too: all
    but sums over batches or heads, which one block of threads would have to take one after the
    other."""
    strides, of = collected.strides, problem.attention
    summed = (of.batch > 1 and not strides.batch) or (of.heads > 1 and not strides.head)
    return not summed and (collected.axes != "pair" or strides.col == 1)


def _main(
    problem: AttentionGradient,
    transposed: bool,
    tile_rows: int,
    sums: tuple[tuple[int, Collected], ...],
) -> Step:
    of, blocks = problem.attention, problem.attention.blocks
    rows, heads = (of.keys, of.kv_heads) if transposed else (of.queries, of.heads)
    first, second = (problem.dk, problem.dv) if transposed else (problem.dq, problem.dq)
    lines = (
        (blocks.grid_cols, blocks.col_words) if transposed else (blocks.grid_rows, blocks.row_words)
    )
    own, columns = (("k", "v"), ("q", "grad"))[:: 1 if transposed else -1]
    tiles = ceil_div(rows, tile_rows)
    numbers = (
        *(*text.views(of), *first[:3], *second[:3]),
        *(
            tiles,
            heads,
            of.group,
            of.heads,
            of.queries,
            of.keys,
            deltas.rows_of(problem, has_sums=True),
            of.features,
        ),
        *(of.layout_batch, of.layout_head, *lines),
        *(_shared(problem, own), _shared(problem, columns)),
        *(stride for _, each in sums for stride in each.strides),
    )
    made = variant(problem, transposed, tile_rows, tuple(each for _, each in sums))
    results = ("dk", "dv") if transposed else ("dq", "dq")
    behind = deltas.nbytes(problem, has_sums=True)
    names = (*own, *columns, *results, "col_bits" if transposed else "row_bits")
    pointers = tuple((name, 0) for name in names)
    pointers += tuple((WORKSPACE, n * behind) for n in (0, 1, 2 * of.score.has_score))
    pointers += tuple((f"collected{place}", 0) for place, _ in sums)
    pointers += tuple((name, 0) for name in text.pointers(of.score))
    maps = (
        *(_map(problem, name, tile_rows) for name in own),
        *(_map(problem, name, min(made.block[1], made.columns)) for name in columns),
    )
    return Step(
        spec(of.score, made),
        (tiles * heads * of.batch, 1),
        parameters(of.score, len(sums)).pack(*numbers),
        pointers,
        len(text.SCALARS),
        maps,
        overlaps=True,
    )


def variant(
    problem: AttentionGradient, transposed: bool, rows: int, sums: tuple[Collected, ...] = ()
) -> Variant:
    """The kernel of a problem."""
    of = problem.attention
    made = variant_of(of.score, of.dtype, of.blocks[:2], of.features, transposed, rows)
    if sums and transposed and (made.features > MOST_BESIDE_SUMS or of.score.dropout):
        made = made._replace(columns=32)
    collected = tuple((each.index, each.axes == "pair") for each in sums)
    pairs = [each.strides for each in sums if each.axes == "pair"]
    wide = all(stride % 2 == 0 for strides in pairs for stride in strides[:3])
    return made._replace(collected=collected, wide_pairs=wide)


def variant_of(
    score: Score, dtype: str, block: tuple[int, int], features: int, transposed: bool, rows: int
) -> Variant:
    """The kernel for blocks of a layout and so many features. Two results of more than 96 leave
    registers for 64 columns, but not beside the bits of a dropout or the slopes of a score."""
    width = next(width for width in WIDTHS if width >= features)
    wide = transposed and width > 96
    columns = 32 if wide and (score.dropout or score.has_score) else 64
    return Variant(dtype, block[:: -1 if transposed else 1], width, transposed, columns, wide, rows)


def stage_bytes(made: Variant) -> int:
    """Of two operands' columns, of the numbers of each where these are rows of q, and of what is
    said of them."""
    slot = ceil_div(made.features, ROW) * 2 * ROW * made.columns
    pieces = max(1, made.columns // made.block[1])
    lines = max(1, made.rows // made.block[0])
    return 2 * slot + 1024 * made.transposed + 2 * 8 + 8 + 4 * (pieces + lines)


def own_bytes(made: Variant) -> int:
    """Of the rows' own operands, a barrier, and what lies before whole 1024 bytes."""
    return 2 * ceil_div(made.features, ROW) * 2 * ROW * made.rows + 8 + 1024


def stages(made: Variant) -> int:
    """As many as there is room for, up to MOST_STAGES."""
    room = SHARED_BYTES[made.rows // HEIGHT] - own_bytes(made)
    return min(MOST_STAGES, room // stage_bytes(made))


def registers(made: Variant) -> tuple[int, int]:
    """Of a producing and of a multiplying thread."""
    warpgroups = made.rows // HEIGHT
    return WIDE_REGISTERS if made.early and warpgroups == 1 else REGISTERS[warpgroups]


def spec(score: Score, made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    (rows, cols), features = made.block, made.features
    said = [
        f"{rows}x{cols}",
        f"{features}x{made.columns}",
        "columns" if made.transposed else "rows",
    ]
    said += text.words(score)
    said += [f"captured {index}" for index, _ in made.collected]
    said += [f"{made.rows} rows"] if made.rows < TILE_ROWS[0] else []
    shared = own_bytes(made) + stages(made) * stage_bytes(made)
    warpgroups = made.rows // HEIGHT
    produces, multiplies = registers(made)
    source = f"""{text.preamble(made.dtype, score)}
constexpr bool TRANSPOSED = {text.flag(made.transposed)};
constexpr int WARPGROUPS = {warpgroups};
constexpr int BLOCK_ROWS = {rows};
constexpr int BLOCK_COLS = {cols};
constexpr int TILE_COLS = {made.columns};
constexpr bool EARLY = {text.flag(made.early)};
constexpr int STAGES = {stages(made)};
constexpr int FEATURES = {features};
constexpr int PRODUCER_REGISTERS = {produces};
constexpr int CONSUMER_REGISTERS = {multiplies};
{text.collected(made.collected)}
constexpr bool SUMMED = false;
constexpr bool WIDE_PAIRS = {text.flag(made.wide_pairs)};
constexpr int DYNAMIC_BYTES = {shared};
constexpr int PARAMETER_BYTES = {parameters(score, len(made.collected)).size};

#include "common/hopper.cuh"

{multiply(made.dtype, made.columns, False)}
{multiply(made.dtype, features, True, right_lines=True)}
#include "blocksparse/attention/hopper_gradient/hopper_gradient.cuh"
"""
    description = " ".join(["blocksparse attention", KIND, "gradient", made.dtype, *said])
    entry = "blocksparse_attention_hopper_gradient"
    found = KernelSpec(
        FAMILY, source, entry, 128 * (warpgroups + 1), shared, description=description
    )
    return named(found, made.dtype, *said)


def parameters(score: Score, collected: int = 0) -> Parameters:
    """The parameter struct."""
    return text.parameters(len(OWN) + collected, FIXED + text.VIEW * collected, score, maps=4)


def variants(
    score: Score, block: tuple[int, int], dtypes: tuple[str, ...], arch: str, **known: int
) -> Iterator[KernelSpec]:
    """Every spec that :func:`lower` may choose for a layout's blocks, of so many ``features`` and
    ``values`` where these are known."""
    features = known.get("features")
    if arch != ARCH or not set(block) <= set(SIDES) or known.get("values", features) != features:
        return
    if features and features > WIDTHS[-1]:
        return
    widths = [next(w for w in WIDTHS if w >= features)] if features else WIDTHS
    for dtype in dtypes:
        if dtype not in HALVES:
            continue
        yield from deltas.variants((dtype,), True, score.has_score)
        for width, turned, rows in product(widths, (False, True), TILE_ROWS):
            yield spec(score, variant_of(score, dtype, block, width, turned, rows))


# Operands as the copy engine is told of them: what serves all heads or batches is one.


def _operand(problem: AttentionGradient, name: str) -> tuple[Operand, int, int]:
    """One by its name, its rows and its heads."""
    of = problem.attention
    if name in ("k", "v"):
        return getattr(of, name), of.keys, of.kv_heads
    return (of.q if name == "q" else problem.grad), of.queries, of.heads


def _extent(problem: AttentionGradient, name: str) -> tma.Extent:
    t, rows, heads = _operand(problem, name)
    batch = problem.attention.batch if t.batch else 1
    sizes = (problem.attention.features, rows, heads if t.head else 1, batch)
    return tma.Extent(sizes, (t.row, t.head, t.batch))


def is_addressable(problem: AttentionGradient, name: str) -> bool:
    """Whether a tensor map holds an operand."""
    alignment = _operand(problem, name)[0].alignment
    return tma.addressable(problem.attention.dtype, alignment, _extent(problem, name))


def is_whole(t: Operand) -> bool:
    """Whether rows are read and written by 16 bytes."""
    return t.alignment % 16 == 0 and not any(stride % 8 for stride in t[:3])


def _map(problem: AttentionGradient, name: str, rows: int) -> TensorMap:
    box = (ROW, rows, 1, 1)
    return tma.tensor_map(problem.attention.dtype, _extent(problem, name), box)


def _shared(problem: AttentionGradient, names: tuple[str, str]) -> int:
    """Bits of what serves all heads, and all batches, of two operands: see parameters.cuh."""
    found = 0
    for place, name in enumerate(names):
        t = _operand(problem, name)[0]
        found |= (int(not t.head) | int(not t.batch) << 1) << 2 * place
    return found
