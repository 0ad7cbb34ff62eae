"""Attention by wgmma and tensor maps, for half types on Hopper and values as wide as keys.

The copy engine wants strides of whole 16 bytes; other operands go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.blocksparse.kernels import order
from kernlib.families.blocksparse.kernels.attention.base import (
    HALVES,
    SIDES,
    AttentionKernel,
    Scope,
    common_sizes,
    is_aligned,
    operand_strides,
)
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import Attention, Operand, Score
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

ARCH = "sm_90a"
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
FIXED = (
    "Strides q_strides", "Strides k_strides", "Strides v_strides", "Strides out_strides",
    "u32 tiles",
    "int row_tiles",  # of a head
    "int units", "int panels", "int last", "int ordered",  # see Schedule
    "int unit_heads", "int panel_heads",  # heads of a batch that units tell apart, and panels
    "int layout_batch", "int layout_head",
    "int heads", "int group",  # of q; of them so many share one of k and v
    "int queries", "int keys", "int values",
    "int lines", "int line_words",  # of blocks of a head of the layout, and their words
    "int unused",
)  # fmt: skip


class Hopper(AttentionKernel):
    """The launch is behind that of the order of its tiles, where these are many."""

    role = "forward"
    name = "hopper"
    title = "hopper"
    header = "blocksparse/attention/hopper/hopper.cuh"
    entry = "blocksparse_attention_hopper"
    reason = (
        "wgmma of sm_90a, half types, values as wide as keys, whole 16 bytes: chosen ahead of "
        "`portable`"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the score. A team is ``members``
        warpgroups: two teams of one each, or one of two."""

        dtype: str
        block: tuple[int, int]
        features: int  # of WIDTHS
        rows: int  # of TILE_ROWS

        @property
        def members(self) -> int:
            return self.rows // HEIGHT

        @property
        def teams(self) -> int:
            return WARPGROUPS // self.members

        @property
        def columns(self) -> int:
            """Of a tile, beside the sums of values of a thread's registers."""
            return 128 if self.features <= 128 else 64

        @property
        def registers(self) -> tuple[int, int]:
            """Of a producing and of a multiplying thread."""
            return (72, 216) if self.features < 256 else (56, 224)

        @property
        def width(self) -> int:
            """Features of v that are multiplied: what matrices with lines of V side by side are
            known to take."""
            return round_up(self.features, ROW)

        @property
        def stages(self) -> int:
            """Slots of a team: as many as shared memory has room for."""
            return max(n for n in range(2, 33) if self.shared_bytes(n) <= SHARED_BYTES)

        def shared_bytes(self, stages: int) -> int:
            """Rows of q, slots, barriers and notes of all teams, each from whole 1024 bytes on."""
            line = ceil_div(self.features, ROW) * 2 * ROW
            pieces = max(1, self.columns // self.block[1])
            lines = max(1, self.rows // self.block[0])
            slot = self.columns * line + 2 * 8 + 16 + 4 * (pieces + lines)  # with barriers and note
            team = self.rows * line + stages * slot + 2 * 8
            return 1024 + self.teams * round_up(team, 1024)

    def takes(self, problem: Attention, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        return (
            has_sizes(problem, arch, WIDTHS[-1])
            and _tiles(problem, HEIGHT) <= MOST_TILES
            and all(is_addressable(problem, name, getattr(problem, name)) for name in MAPS)
            and is_aligned(problem.out)
        )

    def choices(self, problem: Attention, arch: str) -> list[Choice]:
        """The rows that share what comes of K and V, most first."""
        return [{"rows": rows} for rows in TILE_ROWS]

    def default(self, problem: Attention, gpu: Gpu) -> Choice:
        """Rows of one line of blocks, as what only other lines store is multiplied in vain; fewer
        where tiles are so few that multiprocessors have none."""
        is_few = _tiles(problem, TILE_ROWS[0]) < gpu.multiprocessors
        return {"rows": TILE_ROWS[is_few or problem.blocks.rows < TILE_ROWS[0]]}

    def launch(
        self, score: Score, problem: Attention, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem."""
        rows, blocks = int(choice["rows"]), problem.blocks
        variant = self.Variant(problem.dtype, blocks[:2], width_of(problem.features), rows)
        grid = min(gpu.multiprocessors, _tiles(problem, rows))
        teams = grid * variant.teams
        ordered = is_ordered(problem, rows, teams)
        heads = unit_heads(problem)
        panel_heads, batches = problem.heads // heads, _unit_batches(problem)
        panels = panel_heads * (problem.batch // batches)
        row_tiles = problem.row_tiles(rows)
        units = row_tiles * heads * batches
        fixed = text.fields(score, FIXED).values(
            **text.strides(problem),
            **operand_strides(problem, *MAPS, "out"),
            **common_sizes(problem),
            tiles=_tiles(problem, rows),
            row_tiles=row_tiles,
            units=units,
            panels=panels,
            last=min(panels, ceil_div(LAST_TILES * teams, units)),
            ordered=int(ordered),
            unit_heads=heads,
            panel_heads=panel_heads,
            values=problem.values,
            lines=blocks.grid_rows,
            line_words=blocks.row_words,
            unused=0,
        )
        # Without an order nothing is read of what stands there.
        names = (*MAPS, *NAMES, WORKSPACE if ordered else "row_bits", *text.pointers(score))
        main = Step(
            self.spec(score, variant, gpu.arch),
            (grid, 1),
            parameters(score).pack(*fixed),
            tuple((name, 0) for name in names),
            len(text.SCALARS),
            maps(problem, variant),
            overlaps=ordered,
        )
        if not ordered:
            return Lowered((main,))
        return Lowered((_order(problem, rows, units, teams), main), 4 * (1 + units))

    def axes(self, score: Score, scope: Scope) -> Mapping[str, Iterable]:
        """Of blocks of one size."""
        features, values = scope.features, scope.values
        fits = scope.arch == ARCH and set(scope.block) <= set(SIDES)
        fits = fits and not (features and values not in (None, features))
        return {
            "dtype": scope.halves if fits else (),
            "block": [scope.block],
            "features": [width_of(features)] if features else WIDTHS,
            "rows": TILE_ROWS,
        }

    def specs(self, score: Score, scope: Scope, arch: str) -> list[KernelSpec]:
        """With those of the launch before."""
        every = super().specs(score, scope, arch)
        lines = [rows // scope.block[0] for rows in TILE_ROWS if rows >= scope.block[0]]
        orders = [ORDER.spec((), ORDER.Variant(count), arch) for count in lines]
        return [*orders, *every] if every else []

    def spec(self, score: Score, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, (rows, cols), features, tile_rows = variant
        stages, registers = variant.stages, variant.registers
        shared = variant.shared_bytes(stages)
        facts = {
            "TEAMS": variant.teams,
            "MEMBERS": variant.members,
            "PRODUCER_REGISTERS": registers[0],
            "CONSUMER_REGISTERS": registers[1],
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
            "TILE_COLS": variant.columns,
            "STAGES": stages,
            "FEATURES": features,
            "WIDTH": variant.width,
            "DYNAMIC_BYTES": shared,
            "PARAMETER_BYTES": parameters(score).size,
        }
        words = [f"{rows}x{cols}", f"{features}", f"{tile_rows}x{variant.columns}"]
        return self.score_spec(
            score,
            variant,
            facts,
            text.fields(score, FIXED),
            multiply(dtype, variant.columns, False),
            multiply(dtype, variant.width, True, right_lines=True),
            threads=128 * (WARPGROUPS + 1),
            shared=shared,
            words=[dtype, *words, *text.words(score)],
            includes=("common/hopper.cuh",),
        )


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


def width_of(features: int) -> int:
    """Features of the kernel that so many take."""
    return next(width for width in WIDTHS if width >= features)


def parameters(score: Score) -> Parameters:
    """The parameter struct."""
    return text.parameters(len(NAMES) + 1, text.fields(score, FIXED), score, len(MAPS))


def maps(problem: Attention, variant: Hopper.Variant) -> tuple[TensorMap, ...]:
    """Of q, k and v, read by boxes of a tile's rows, and of columns that lie side by side."""
    rows = variant.rows, *(min(problem.blocks.cols, variant.columns),) * 2
    every = zip(MAPS, rows, strict=True)
    return tuple(map_of(problem, name, getattr(problem, name), count) for name, count in every)


# What every kernel by wgmma asks of a problem, and how the copy engine is told of its operands.


def has_sizes(problem: Attention, arch: str, widest: int) -> bool:
    """Whether a problem is one of half types on Hopper, of sizes of which none is 0, and of so many
    features at most."""
    return (
        arch == ARCH
        and problem.dtype in HALVES
        and all(side in SIDES for side in problem.blocks[:2])
        and problem.features == problem.values
        and 16 <= problem.features <= widest
        and problem.features % 8 == 0
        and min(problem.batch, problem.heads, problem.queries, problem.keys) > 0
        and max(problem.queries, problem.keys) <= text.WIDEST
    )


def is_addressable(problem: Attention, name: str, t: Operand) -> bool:
    """Whether a tensor map holds an operand."""
    return tma.addressable(problem.dtype, t.alignment, _extent(problem, name, t))


def map_of(problem: Attention, name: str, t: Operand, rows: int) -> TensorMap:
    """Its map, read by boxes of so many rows and 64 features."""
    return tma.tensor_map(problem.dtype, _extent(problem, name, t), (ROW, rows, 1, 1))


def _extent(problem: Attention, name: str, t: Operand) -> tma.Extent:
    """What serves all heads or batches is one."""
    rows, heads = problem.queries, problem.heads
    if name in ("k", "v"):
        rows, heads = problem.keys, problem.kv_heads
    sizes = (problem.features, rows, heads if t.head else 1, problem.batch if t.batch else 1)
    return tma.Extent(sizes, (t.row, t.head, t.batch))


def _tiles(problem: Attention, rows: int) -> int:
    return problem.row_tiles(rows) * problem.heads * problem.batch
