"""Gradients of attention by mma.sync, on every GPU, for every problem of half types.

Three launches share a workspace: what rows are relative to (deltas), then dq by rows of the matrix,
and dk and dv by its columns. Captured tensors with rows have their gradient from the one by rows,
those of columns alone from that by columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

from kernlib.families.blocksparse.kernels.attention import portable
from kernlib.families.blocksparse.kernels.attention.base import (
    AttentionKernel,
    Scope,
    is_aligned,
    operand_strides,
)
from kernlib.families.blocksparse.kernels.attention.gradient import deltas
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Collected,
    Score,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

WARPS = 4
LINES = 16 * WARPS  # of a block of threads
MOST_SUMS = 256  # of dk and dv together, of each of a warp's 16 lines: half of its registers
NAMES = ("q", "k", "v", "grad", "lse", "rest", WORKSPACE)  # behind the layout's bits
BY_ROWS, BY_COLUMNS = ("row", "pair"), ("col",)
# Columns of 64 rows whose pairs one block of threads sums up batch after batch: of the blocks that
# are under way the sums, 128 KiB each, stay in a cache of 50 MB.
SHARE = 512
MOST_SHARES = 65535  # a grid's second dimension
FIXED = (
    "Strides q_strides", "Strides k_strides", "Strides v_strides", "Strides grad_strides",
    "Strides first_strides", "Strides second_strides",
    *portable.SIZES,
    "int batches_of_cta", "int heads_of_cta",  # SUMMED: 1, or all of them
    "i64 delta_rows",
    "i64 share",  # SHARED: rows or columns of a line of tiles that a CTA has
)  # fmt: skip
Sums = tuple[tuple[int, Collected], ...]  # with their places among all that are collected


class Tile(NamedTuple):
    """Of the tiles that lines walk over: their depth, and how many are under way."""

    depth: int
    stages: int


# Deepest first: what there is room for decides. Two under way hide the copies of one.
TILES = (Tile(64, 2), Tile(32, 2), Tile(32, 1), Tile(16, 1))
DEEP_WIDTH = 64  # up to which tiles of 64 leave registers for sums


class PortableGradient(AttentionKernel):
    """By rows or, turned, by columns of the matrix."""

    role = "gradient"
    name = "portable"
    title = "gradient"
    header = "blocksparse/attention/gradient/portable/portable.cuh"
    entry = "blocksparse_attention_gradient"
    rank = 1
    reason = "gradients of attention by mma.sync, on every GPU"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the score."""

        dtype: str
        block: tuple[int, int]
        turned: bool  # by columns
        features: int  # multiples of 16
        values: int
        needs: tuple[bool, bool]  # dq or dk, and dv
        tile: Tile
        collected: tuple[tuple[int, bool], ...] = ()  # captured tensors, whether they are of pairs
        summed: bool = False  # whether some of these are summed over batches or heads
        shared: bool = False  # whether blocks of threads share the tiles of a line, of pairs alone

        @property
        def parts(self) -> int:
            """Blocks of threads that share the sums of a tile of lines."""
            sums = self.features * self.needs[0] + self.values * self.needs[1]
            return ceil_div(sums, MOST_SUMS) or 1

    def takes(self, problem: AttentionGradient, arch: str) -> bool:
        """Whether the kernel computes a problem: what the one of its attention computes."""
        others = (problem.grad, problem.dq, problem.dk, problem.dv)
        return portable.Portable().takes(problem.attention, arch) and all(map(is_aligned, others))

    def choices(self, problem: AttentionGradient, arch: str) -> list[Choice]:
        """The depths of tiles, by preference."""
        return [tile._asdict() for tile in tiles(*portable.widths(problem.attention), arch)]

    def launch(
        self, score: Score, problem: AttentionGradient, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem. Raises UnsupportedError for sizes that no grid can hold."""
        tile = Tile(int(choice["depth"]), int(choice["stages"]))
        sums, rows = tuple(enumerate(problem.collected)), deltas.rows_of(problem)
        steps = self._steps(problem, problem.needs, tile, sums, rows)
        return Lowered((deltas.Deltas().step(problem), *steps), deltas.nbytes(problem))

    def collecting(
        self, problem: AttentionGradient, arch: str, sums: Sums, delta_rows: int
    ) -> tuple[Step, ...]:
        """The launches that leave these gradients by captured tensors and nothing else: two
        products an element, and one launch an axis. Deltas lie at the beginning of the workspace,
        so many of each head."""
        tile = tiles(*portable.widths(problem.attention), arch)[0]
        return self._steps(problem, (False, False, False), tile, sums, delta_rows)

    def _steps(
        self,
        problem: AttentionGradient,
        needs: tuple[bool, bool, bool],
        tile: Tile,
        sums: Sums,
        delta_rows: int,
    ) -> tuple[Step, ...]:
        """The launches by rows and by columns of what is needed."""
        of_rows, of_columns = (
            tuple(each for each in sums if each[1].axes in kinds) for kinds in (BY_ROWS, BY_COLUMNS)
        )
        needs_q, *others = needs
        steps = []
        if needs_q or of_rows:
            steps.append(self._step(problem, False, (needs_q, False), tile, of_rows, delta_rows))
        if any(others) or of_columns:
            steps.append(self._step(problem, True, tuple(others), tile, of_columns, delta_rows))
        return tuple(steps)

    def _step(
        self,
        problem: AttentionGradient,
        turned: bool,
        needs: tuple[bool, bool],
        tile: Tile,
        sums: Sums,
        delta_rows: int,
    ) -> Step:
        """The launch by rows or, ``turned``, by columns."""
        attention, score = problem.attention, problem.attention.score
        collected = tuple((each.index, each.axes == "pair") for _, each in sums)
        batches, of_cta = (1, 1) if turned else together(problem, sums)
        summed = batches * of_cta > 1
        shared = summed and not any(needs) and all(is_pair for _, is_pair in collected)
        share = SHARE * ceil_div(attention.keys, SHARE * MOST_SHARES)
        variant = self.Variant(
            attention.dtype,
            attention.blocks[:2],
            turned,
            *portable.widths(attention),
            needs,
            tile,
            collected,
            summed,
            shared,
        )
        results = ("dk", "dv") if turned else ("dq", "dq")
        first, second = (getattr(problem, name) for name in results)
        lines, heads = (
            (attention.keys, attention.kv_heads) if turned else (attention.queries, attention.heads)
        )
        count = ceil_div(lines, LINES)
        fixed = fields(score, len(sums)).pack(
            **text.strides(attention),
            **operand_strides(attention, "q", "k", "v"),
            **operand_strides(problem, "grad"),
            first_strides=first[:3],
            second_strides=second[:3],
            **portable.sizes(attention, count),
            batches_of_cta=batches,
            heads_of_cta=of_cta,
            delta_rows=delta_rows,
            share=share,
            **text.collected_strides(each for _, each in sums),
        )
        # What is not needed has no tensor: the address of q stands there, and nobody reads it.
        results = (name if need else "q" for name, need in zip(results, needs, strict=True))
        names = ["col_bits" if turned else "row_bits", *NAMES, *results]
        names += [f"collected{place}" for place, _ in sums]
        count *= attention.batch // max(1, batches) * (heads // of_cta)
        parts = ceil_div(attention.keys, share) if shared else variant.parts
        return Step(
            self.spec(score, variant),
            (portable.grid(count), parts),
            fixed,
            tuple((name, 0) for name in (*names, *text.pointers(score))),
            len(text.SCALARS),
        )

    def axes(self, score: Score, scope: Scope) -> Mapping[str, Iterable]:
        """Of gradients by q, k and v of a layout's blocks."""
        features, values = (
            [round_up(width, 16)] if width else portable.WIDTHS
            for width in (scope.features, scope.values)
        )
        flags = (False, True)
        return {
            "dtype": scope.halves,
            "block": [scope.block],
            "turned": flags,
            "features": features,
            "values": values,
            "needs": [needs for needs in product(flags, flags) if any(needs)],
            "tile": TILES,
            "collected": [()],
            "summed": [False],
            "shared": [False],
        }

    def is_legal(self, variant: Variant, score: Score, scope: Scope) -> bool:
        """Of tiles that a width is for; by rows there is dq alone."""
        fitting = tiles(variant.features, variant.values, scope.arch)
        return variant.tile in fitting and (variant.turned or variant.needs == (True, False))

    def specs(self, score: Score, scope: Scope, arch: str) -> list[KernelSpec]:
        """With those of the launch before."""
        before = deltas.Deltas().specs(None, (scope.halves, False, False), arch)
        return [*before, *super().specs(score, scope, arch)]

    def spec(self, score: Score, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        line, depth = reversed(variant.block) if variant.turned else variant.block
        features, values, count = variant.features, variant.values, len(variant.collected)
        first, second = (round_up(ceil_div(n, variant.parts), 16) for n in (features, values))
        facts = {
            "TURNED": variant.turned,
            "NEEDS_FIRST": variant.needs[0],
            "NEEDS_SECOND": variant.needs[1],
            "WARPS": WARPS,
            "TILE_DEPTH": variant.tile.depth,
            "STAGES": variant.tile.stages,
            "BLOCK_LINE": line,
            "BLOCK_DEPTH": depth,
            "FEATURES": features,
            "VALUES": values,
            "FIRST_PART": first,
            "SECOND_PART": second,
            "COLLECTED": count,
            "SUMMED": variant.summed,
            "SHARED": variant.shared,
            "MIN_BLOCKS": 2 if max(features, values) <= 128 else 1,
            "PARAMETER_BYTES": parameters(score, count).size,
        }
        return self.score_spec(
            score,
            variant,
            facts,
            fields(score, count),
            text.collected(variant.collected),
            threads=32 * WARPS,
            shared=shared_bytes(features, values, variant.tile),
            words=[self.name, variant.dtype, *_words(variant), *text.words(score)],
        )


def together(problem: AttentionGradient, sums: Sums) -> tuple[int, int]:
    """Batches and heads that a block of threads takes one after the other: all of those over which
    a captured tensor's gradient is summed, else one."""
    attention, views = problem.attention, [each.strides for _, each in sums]
    return (
        1 if all(view.batch for view in views) else max(1, attention.batch),
        1 if all(view.head for view in views) else max(1, attention.heads),
    )


def tiles(features: int, values: int, arch: str) -> list[Tile]:
    """Those that a GPU has shared memory and registers for."""
    most = 64 if max(features, values) <= DEEP_WIDTH else 32
    room = targets.SHARED_BYTES[arch]
    fitting = (tile for tile in TILES if shared_bytes(features, values, tile) <= room)
    return [tile for tile in fitting if tile.depth <= most]


def _words(variant: PortableGradient.Variant) -> list[str]:
    rows, cols = variant.block
    results = ("dk", "dv") if variant.turned else ("dq", "")
    words = [f"{rows}x{cols}", f"{variant.features}/{variant.values}"]
    words += [f"{variant.tile.depth} deep", *["1 stage"] * (variant.tile.stages == 1)]
    words += [name for name, need in zip(results, variant.needs, strict=True) if need]
    words += [f"captured {index}" for index, _ in variant.collected]
    return words + ["summed"] * variant.summed + ["shared"] * variant.shared


def shared_bytes(features: int, values: int, tile: Tile) -> int:
    """A tile's lines, and stages: of the others' rows and, turned, what is known of these."""
    row = portable.pitch(features) + portable.pitch(values)
    return LINES * row + tile.stages * tile.depth * (row + 3 * 4)


def fields(score: Score, collected: int) -> Fields:
    """What a plan fixes."""
    return text.fields(score, FIXED, collected)


def parameters(score: Score, collected: int) -> Parameters:
    """The parameter struct."""
    return text.parameters(1 + len(NAMES) + 2 + collected, fields(score, collected), score)
