"""The kernel of kernel_sources/blocksparse/attention/hopper/hopper.cuh: attention by wgmma and
tensor maps, for half types on Hopper and values as wide as keys.

The copy engine wants strides of whole 16 bytes; other operands go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from kernlib.families.blocksparse.kernels import order
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import Attention, Operand, Score
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

KIND = "hopper"
FAMILY = "blocksparse"
ARCH = "sm_90a"
HALVES = ("float16", "bfloat16")
SIDES = (16, 32, 64, 128)  # of blocks
ROW, HEIGHT = 64, 64  # features of a row of shared memory, rows of a warpgroup
WARPGROUPS = 2  # that multiply
TILE_ROWS = (128, 64)  # that share what comes of K and V
WIDTHS = (32, 64, 96, 128, 192, 256)  # features, with zeros behind them
SHARED_BYTES = 227 * 1024
# K and V of so many bytes at a time. All heads of 16 x 16384 x 128 at a time took .725 ms of
# blocks of 64 at density .1, where tiles as they come, a head's together, took .504.
GROUP_BYTES = 12 << 20
MOST_GROUPS = 16  # so that lengths are told apart by 64 keys
LAST_TILES = 2  # of a team, that come by falling length
MOST_TILES = 2**31 - 1
MAPS = ("q", "k", "v")
NAMES = ("q", "k", "v", "out", "lse", "rest", "row_bits")
FIXED = "12qI16i"  # struct Fixed


class Variant(NamedTuple):
    """Everything that code generation chooses besides the score: a team is ``members`` warpgroups,
    ``columns`` are a tile's, ``stages`` a team's slots, ``registers`` those of a producing and of a
    multiplying thread, and ``width`` the features of v that are multiplied."""

    dtype: str
    block: tuple[int, int]
    features: int  # of WIDTHS
    members: int
    columns: int
    stages: int
    teams: int
    registers: tuple[int, int]
    width: int


def takes(problem: Attention, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    return (
        arch == ARCH
        and problem.dtype in HALVES
        and all(side in SIDES for side in problem.blocks[:2])
        and problem.features == problem.values
        and 16 <= problem.features <= WIDTHS[-1]
        and problem.features % 8 == 0
        and min(shape) > 0
        and max(problem.queries, problem.keys) <= text.WIDEST
        and _tiles(problem, HEIGHT) <= MOST_TILES
        and all(_is_addressable(problem, operand, size) for operand, size in _operands(problem))
        and _is_whole(problem.out)
    )


def candidates(problem: Attention, arch: str) -> list[Choice]:
    """The rows that share what comes of K and V, most first."""
    return [{"rows": rows} for rows in TILE_ROWS]


def default(problem: Attention, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: rows of one line of blocks, as what only other lines
    store is multiplied in vain; fewer where tiles are so few that multiprocessors have none."""
    is_few = _tiles(problem, TILE_ROWS[0]) < multiprocessors
    rows = TILE_ROWS[1] if is_few or problem.blocks.rows < TILE_ROWS[0] else TILE_ROWS[0]
    return next(choice for choice in known if choice["rows"] == rows)


def lower(
    problem: Attention, arch: str, multiprocessors: int, choice: Choice | None = None
) -> Lowered:
    """The launch of a problem that the kernel takes, with the rows of ``choice``, one of
    :func:`candidates`, behind that of the order of its tiles where these are many."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    made = variant(problem.dtype, problem.blocks[:2], width(problem), int(choice["rows"]))
    return launch(problem, made, multiprocessors)


def launch(problem: Attention, made: Variant, multiprocessors: int) -> Lowered:
    """The launches of a problem by a variant for it."""
    rows = made.members * HEIGHT
    grid = min(multiprocessors, _tiles(problem, rows))
    teams = grid * made.teams
    ordered = is_ordered(problem, rows, teams)
    heads = unit_heads(problem)
    panel_heads, batches = problem.heads // heads, _unit_batches(problem)
    panels = panel_heads * (problem.batch // batches)
    row_tiles = problem.row_tiles(rows)
    units = row_tiles * heads * batches
    blocks = problem.blocks
    strides = [n for t in (problem.q, problem.k, problem.v, problem.out) for n in t[:3]]
    numbers = (
        *(_tiles(problem, rows), row_tiles),
        *(units, panels, min(panels, ceil_div(LAST_TILES * teams, units)), int(ordered)),
        *(heads, panel_heads, problem.layout_batch, problem.layout_head),
        *(problem.heads, problem.group, problem.queries, problem.keys, problem.values),
        *(blocks.grid_rows, blocks.row_words),
    )
    # Without an order nothing is read of what is given for it.
    names = (*MAPS, *NAMES, WORKSPACE if ordered else "row_bits", *text.pointers(problem.score))
    main = Step(
        spec(problem.score, made),
        (grid, 1),
        parameters(problem.score).pack(*text.views(problem), *strides, *numbers),
        tuple((name, 0) for name in names),
        len(text.SCALARS),
        maps(problem, made),
        overlaps=ordered,
    )
    if not ordered:
        return Lowered((main,))
    return Lowered((_order(problem, rows, units, teams), main), 4 * (1 + units))


def is_ordered(problem: Attention, rows: int, teams: int) -> bool:
    """Whether teams take tiles from a counter, the longest first: of more tiles than teams, whose
    units are lines of blocks of the layout's heads, one after the other."""
    heads = unit_heads(problem)
    units = problem.row_tiles(rows) * heads * _unit_batches(problem)
    return (
        _tiles(problem, rows) > teams
        and rows >= problem.blocks.rows
        and units <= order.MOST_UNITS
        and problem.layout_head in (0, 1)
        and problem.layout_batch in (0, heads)
    )


def _order(problem: Attention, rows: int, units: int, first: int) -> Step:
    blocks, tiles = problem.blocks, problem.row_tiles(rows)
    per_group, last = _groups(problem, tiles, units, first)
    numbers = {"groups": tiles, "units": units, "lines": blocks.grid_rows}
    return ORDER.step_of(
        rows // blocks.rows,
        "row_bits",
        first,
        blocks.row_words,
        **numbers,
        **order.keys(blocks.grid_cols, per_group, last),
    )


def _groups(problem: Attention, tiles: int, units: int, teams: int) -> tuple[int, int]:
    """Units of a group, whose heads find K and V in L2 together, and the last group, which has so
    many units that they end at about the same time."""
    head = 2 * problem.keys * (problem.features + problem.values)  # bytes of K and V
    sharing = problem.group if problem.layout_head else 1
    heads = max(sharing * max(1, GROUP_BYTES // head), ceil_div(units, tiles * MOST_GROUPS))
    per_group = heads * tiles
    of_last = max(per_group, LAST_TILES * teams)
    return per_group, max(0, units - of_last) // per_group


def unit_heads(problem: Attention) -> int:
    """Heads of a batch that the layout tells apart."""
    return problem.heads if problem.layout_head else 1


def _unit_batches(problem: Attention) -> int:
    return problem.batch if problem.layout_batch else 1


def width(problem: Attention) -> int:
    """Features of the kernel that a problem takes."""
    return next(width for width in WIDTHS if width >= problem.features)


def variant(dtype: str, block: tuple[int, int], features: int, rows: int) -> Variant:
    """The kernel of so many rows that share K and V. Two teams of a warpgroup each, or one of two,
    and as many slots as shared memory has room for."""
    members = rows // HEIGHT
    columns = 128 if features <= 128 else 64  # beside the sums of values of a thread's registers
    registers = (72, 216) if features < 256 else (56, 224)
    teams = WARPGROUPS // members
    wide = round_up(features, ROW)  # what matrices with lines of V side by side are known to take
    made = Variant(dtype, block, features, members, columns, 0, teams, registers, wide)
    fitting = (n for n in range(2, 33) if shared_bytes(made._replace(stages=n)) <= SHARED_BYTES)
    return made._replace(stages=max(fitting))


def shared_bytes(made: Variant) -> int:
    """Rows of q, slots, barriers and notes of all teams, each from whole 1024 bytes on."""
    line = ceil_div(made.features, ROW) * 2 * ROW
    pieces = max(1, made.columns // made.block[1])
    lines = max(1, made.members * HEIGHT // made.block[0])
    slot = made.columns * line + 2 * 8 + 16 + 4 * (pieces + lines)  # with its barriers and its note
    team = made.members * HEIGHT * line + made.stages * slot + 2 * 8
    return 1024 + made.teams * round_up(team, 1024)


def spec(score: Score, made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    (rows, cols), features = made.block, made.features
    said = [f"{rows}x{cols}", f"{features}", f"{made.members * HEIGHT}x{made.columns}"]
    said += text.words(score)
    shared = shared_bytes(made)
    source = f"""{text.preamble(made.dtype, score)}
constexpr int TEAMS = {made.teams};
constexpr int MEMBERS = {made.members};
constexpr int PRODUCER_REGISTERS = {made.registers[0]};
constexpr int CONSUMER_REGISTERS = {made.registers[1]};
constexpr int BLOCK_ROWS = {rows};
constexpr int BLOCK_COLS = {cols};
constexpr int TILE_COLS = {made.columns};
constexpr int STAGES = {made.stages};
constexpr int FEATURES = {features};
constexpr int WIDTH = {made.width};
constexpr int DYNAMIC_BYTES = {shared};
constexpr int PARAMETER_BYTES = {parameters(score).size};

#include "common/hopper.cuh"

{multiply(made.dtype, made.columns, False)}
{multiply(made.dtype, made.width, True, right_lines=True)}
#include "blocksparse/attention/hopper/hopper.cuh"
"""
    threads = 128 * (made.teams * made.members + 1)
    description = " ".join(["blocksparse attention", KIND, made.dtype, *said])
    entry = "blocksparse_attention_hopper"
    found = KernelSpec(FAMILY, source, entry, threads, shared, description=description)
    return named(found, made.dtype, *said)


def parameters(score: Score) -> Parameters:
    """The parameter struct."""
    return text.parameters(len(NAMES) + 1, FIXED, score, len(MAPS))


def variants(
    score: Score, block: tuple[int, int], dtypes: tuple[str, ...], arch: str, **known: int
) -> Iterator[KernelSpec]:
    """Every spec that :func:`lower` may choose for a layout's blocks, of so many ``features`` and
    ``values`` where these are known."""
    features, values = known.get("features"), known.get("values")
    if (
        arch != ARCH
        or not set(block) <= set(SIDES)
        or (features and values not in (None, features))
    ):
        return
    widths = [next(w for w in WIDTHS if w >= features)] if features else WIDTHS
    for rows in TILE_ROWS:
        if rows >= block[0]:
            yield ORDER.spec((), ORDER.Variant(rows // block[0]), arch)
        for dtype, wide in product(dtypes, widths):
            if dtype in HALVES:
                yield spec(score, variant(dtype, block, wide, rows))


def maps(problem: Attention, made: Variant) -> tuple[TensorMap, ...]:
    """Of q, k and v, read by boxes of 64 features: of a tile's rows, and of columns that lie side
    by side."""
    rows = made.members * HEIGHT, *(min(problem.blocks.cols, made.columns),) * 2
    return tuple(
        tma.tensor_map(problem.dtype, _extent(problem, *each), (ROW, count, 1, 1))
        for each, count in zip(_operands(problem), rows, strict=True)
    )


def _operands(problem: Attention) -> list[tuple[Operand, tuple[int, int]]]:
    """Those that the copy engine reads, and their rows and heads."""
    keys = (problem.keys, problem.kv_heads)
    return [
        (problem.q, (problem.queries, problem.heads)),
        (problem.k, keys),
        (problem.v, keys),
    ]


def _extent(problem: Attention, t: Operand, size: tuple[int, int]) -> tma.Extent:
    """What serves all heads or batches is one."""
    rows, heads = size
    sizes = (problem.features, rows, heads if t.head else 1, problem.batch if t.batch else 1)
    return tma.Extent(sizes, (t.row, t.head, t.batch))


def _is_addressable(problem: Attention, t: Operand, size: tuple[int, int]) -> bool:
    return tma.addressable(problem.dtype, t.alignment, _extent(problem, t, size))


def _is_whole(t: Operand) -> bool:
    """Whether rows are written by 16 bytes."""
    return t.alignment % 16 == 0 and not any(stride % 8 for stride in t[:3])


def _tiles(problem: Attention, rows: int) -> int:
    return problem.row_tiles(rows) * problem.heads * problem.batch
