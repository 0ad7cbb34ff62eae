"""Gradients of attention by wgmma and tensor maps, for half types on Hopper, values as wide as
keys.

First a launch of deltas, then one over the rows of the layout for dq and one over its columns for
dk and dv. These have the gradients by captured tensors too: by rows of each head and by pairs of a
row and a column the first, by columns the second. Pairs that are summed over batches or heads have
a launch of the portable kernel, and nothing else in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.blocksparse.kernels.attention.base import (
    SIDES,
    AttentionKernel,
    Scope,
    common_sizes,
    is_aligned,
)
from kernlib.families.blocksparse.kernels.attention.gradient import deltas
from kernlib.families.blocksparse.kernels.attention.gradient.portable import PortableGradient, Sums
from kernlib.families.blocksparse.kernels.attention.hopper import (
    ARCH,
    HEIGHT,
    MOST_TILES,
    ROW,
    TILE_ROWS,
    has_sizes,
    is_addressable,
    map_of,
)
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Collected,
    Operand,
    Score,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

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
POINTERS = 6  # beside those of maps
FIXED = (
    "Strides first_strides", "Strides second_strides",
    "int row_tiles",  # of a head
    "int own_heads", "int group",  # heads of the rows; heads of q that a head of k serves
    "int heads", "int queries", "int keys",  # of q, and its rows
    "int padded",  # these as workspaces have them
    "int features", "int layout_batch", "int layout_head",
    "int lines", "int line_words",  # of blocks of a head of op(S), and their words
    "int own_shared", "int column_shared",  # bits of what serves all heads or batches
)  # fmt: skip


class HopperGradient(AttentionKernel):
    """Over the rows of op(S), which is S or its transpose."""

    role = "gradient"
    name = "hopper"
    title = "hopper gradient"
    header = "blocksparse/attention/gradient/hopper/hopper.cuh"
    entry = "blocksparse_attention_hopper_gradient"
    reason = "gradients of what `hopper` takes"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the score. ``block`` are rows and columns
        of one of op(S)."""

        dtype: str
        block: tuple[int, int]
        features: int  # of WIDTHS
        transposed: bool
        columns: int  # of a tile
        rows: int  # of TILE_ROWS
        collected: tuple[tuple[int, bool], ...] = ()  # captured tensors, whether they are of pairs
        wide_pairs: bool = True  # of which two neighbours are written at once

        @property
        def early(self) -> bool:
            """Whether dv is added to before slopes are made, which takes fewer registers."""
            return self.transposed and self.features > 96

        @property
        def warpgroups(self) -> int:
            """That multiply."""
            return self.rows // HEIGHT

        @property
        def registers(self) -> tuple[int, int]:
            """Of a producing and of a multiplying thread."""
            wide = self.early and self.warpgroups == 1
            return WIDE_REGISTERS if wide else REGISTERS[self.warpgroups]

        @property
        def stage_bytes(self) -> int:
            """Of two operands' columns, of the numbers of each where these are rows of q, and of
            what is said of them."""
            slot = ceil_div(self.features, ROW) * 2 * ROW * self.columns
            pieces = max(1, self.columns // self.block[1])
            lines = max(1, self.rows // self.block[0])
            return 2 * slot + 1024 * self.transposed + 2 * 8 + 8 + 4 * (pieces + lines)

        @property
        def row_bytes(self) -> int:
            """Of operands of a tile's rows, a barrier, and what lies before whole 1024 bytes."""
            return 2 * ceil_div(self.features, ROW) * 2 * ROW * self.rows + 8 + 1024

        @property
        def stages(self) -> int:
            """As many as there is room for, up to MOST_STAGES."""
            room = SHARED_BYTES[self.warpgroups] - self.row_bytes
            return min(MOST_STAGES, room // self.stage_bytes)

    def takes(self, problem: AttentionGradient, arch: str) -> bool:
        """Whether the kernels compute a problem."""
        of, names = problem.attention, ("q", "k", "v", "grad")
        tiles = of.batch * of.heads * ceil_div(deltas.rows_of(problem, has_sums=True), HEIGHT)
        return (
            has_sizes(of, arch, WIDTHS[-1])
            and tiles <= MOST_TILES
            and all(is_addressable(of, name, _operand(problem, name)) for name in names)
            and all(map(is_aligned, (of.out, problem.dq, problem.dk, problem.dv)))
        )

    def choices(self, problem: AttentionGradient, arch: str) -> list[Choice]:
        """By rows of a CTA's tile."""
        return [{"rows": rows} for rows in TILE_ROWS]

    def default(self, problem: AttentionGradient, gpu: Gpu) -> Choice:
        """64 rows, of which the fewest lines of blocks share what each of them stores. Blocks of
        128 too take up to 12 % less time by them, but where nearly all are stored up to 5 %
        more."""
        return {"rows": TILE_ROWS[-1]}

    def launch(
        self, score: Score, problem: AttentionGradient, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem. Raises UnsupportedError for sizes that no grid can hold."""
        rows, count = int(choice["rows"]), deltas.rows_of(problem, has_sums=True)
        every = tuple(enumerate(problem.collected))
        inside = tuple(each for each in every if is_inside(problem, each[1]))
        of_columns = tuple(each for each in inside if each[1].axes == "col")
        of_rows = tuple(each for each in inside if each[1].axes != "col")
        steps = [deltas.Deltas().step(problem, has_sums=True)]
        if problem.needs[0] or of_rows:
            steps.append(self._main(problem, False, rows, of_rows))
        if any(problem.needs[1:]) or of_columns:
            steps.append(self._main(problem, True, rows, of_columns))
        apart = tuple(each for each in every if each not in inside)
        if apart:  # what these kernels take that one takes too
            steps += PortableGradient().collecting(problem, gpu.arch, apart, count)
        numbers = 2 + score.has_score
        return Lowered(tuple(steps), numbers * deltas.nbytes(problem, has_sums=True))

    def _main(
        self, problem: AttentionGradient, transposed: bool, tile_rows: int, sums: Sums
    ) -> Step:
        of, blocks, score = problem.attention, problem.attention.blocks, problem.attention.score
        rows, heads = (of.keys, of.kv_heads) if transposed else (of.queries, of.heads)
        results = ("dk", "dv") if transposed else ("dq", "dq")
        first, second = (getattr(problem, name) for name in results)
        lines, words = blocks.grid_rows, blocks.row_words
        if transposed:
            lines, words = blocks.grid_cols, blocks.col_words
        row_operands, column_operands = (("k", "v"), ("q", "grad"))[:: 1 if transposed else -1]
        tiles = ceil_div(rows, tile_rows)
        fixed = fields(score, len(sums)).values(
            **text.strides(of),
            first_strides=first[:3],
            second_strides=second[:3],
            row_tiles=tiles,
            own_heads=heads,
            **common_sizes(of),
            padded=deltas.rows_of(problem, has_sums=True),
            features=of.features,
            lines=lines,
            line_words=words,
            own_shared=_shared(problem, row_operands),
            column_shared=_shared(problem, column_operands),
            **text.collected_strides(each for _, each in sums),
        )
        variant = variant_of_problem(problem, transposed, tile_rows, [each for _, each in sums])
        behind = deltas.nbytes(problem, has_sums=True)
        names = (
            *row_operands,
            *column_operands,
            *results,
            "col_bits" if transposed else "row_bits",
        )
        pointers = tuple((name, 0) for name in names)
        pointers += tuple((WORKSPACE, n * behind) for n in (0, 1, 2 * score.has_score))
        pointers += tuple((f"collected{place}", 0) for place, _ in sums)
        pointers += tuple((name, 0) for name in text.pointers(score))
        boxes = dict.fromkeys(row_operands, tile_rows)
        boxes |= dict.fromkeys(column_operands, min(variant.block[1], variant.columns))
        maps = (map_of(of, name, _operand(problem, name), n) for name, n in boxes.items())
        return Step(
            self.spec(score, variant),
            (tiles * heads * of.batch, 1),
            parameters(score, len(sums)).pack(*fixed),
            pointers,
            len(text.SCALARS),
            tuple(maps),
            overlaps=True,
        )

    def axes(self, score: Score, scope: Scope) -> Mapping[str, Iterable]:
        """Of gradients by q, k and v of a layout's blocks."""
        features = scope.features
        fits = scope.arch == ARCH and set(scope.block) <= set(SIDES)
        fits = fits and scope.values in (None, features) and (features or 0) <= WIDTHS[-1]
        return {
            "dtype": scope.halves if fits else (),
            "block": dict.fromkeys((scope.block, scope.block[::-1])),
            "features": [width_of(features)] if fits and features else WIDTHS,
            "transposed": (False, True),
            "columns": (64, 32),
            "rows": TILE_ROWS,
            "collected": [()],
            "wide_pairs": [True],
        }

    def is_legal(self, variant: Variant, score: Score, scope: Scope) -> bool:
        """Whether these are a layout's blocks, and the columns that there are registers for."""
        dtype, _, features, transposed, _, rows, *_ = variant
        return variant == variant_of(score, dtype, scope.block, features, transposed, rows)

    def specs(self, score: Score, scope: Scope, arch: str) -> list[KernelSpec]:
        """With those of the launch before."""
        every = super().specs(score, scope, arch)
        sums = scope.halves, True, score.has_score
        return [*deltas.Deltas().specs(None, sums, arch), *every] if every else []

    def spec(self, score: Score, variant: Variant, arch: str = ARCH) -> KernelSpec:
        """The specification of a variant."""
        (rows, cols), features, columns = variant.block, variant.features, variant.columns
        stages, count = variant.stages, len(variant.collected)
        shared = variant.row_bytes + stages * variant.stage_bytes
        produces, multiplies = variant.registers
        facts = {
            "TRANSPOSED": variant.transposed,
            "WARPGROUPS": variant.warpgroups,
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
            "TILE_COLS": columns,
            "EARLY": variant.early,
            "STAGES": stages,
            "FEATURES": features,
            "PRODUCER_REGISTERS": produces,
            "CONSUMER_REGISTERS": multiplies,
            "COLLECTED": count,
            "SUMMED": False,
            "WIDE_PAIRS": variant.wide_pairs,
            "DYNAMIC_BYTES": shared,
            "PARAMETER_BYTES": parameters(score, count).size,
        }
        words = [variant.dtype, f"{rows}x{cols}", f"{features}x{columns}"]
        words += ["columns" if variant.transposed else "rows", *text.words(score)]
        words += [f"captured {index}" for index, _ in variant.collected]
        words += [f"{variant.rows} rows"] if variant.rows < TILE_ROWS[0] else []
        return self.score_spec(
            score,
            variant,
            facts,
            fields(score, count),
            text.collected(variant.collected),
            multiply(variant.dtype, columns, False),
            multiply(variant.dtype, features, True, right_lines=True),
            threads=128 * (variant.warpgroups + 1),
            shared=shared,
            words=words,
            includes=("common/hopper.cuh",),
        )


def is_inside(problem: AttentionGradient, collected: Collected) -> bool:
    """Whether the launches that have dq, or dk and dv, have a captured tensor's gradient too: all
    but sums over batches or heads, which one block of threads would have to take one after the
    other."""
    strides, of = collected.strides, problem.attention
    summed = (of.batch > 1 and not strides.batch) or (of.heads > 1 and not strides.head)
    return not summed and (collected.axes != "pair" or strides.col == 1)


def variant_of_problem(
    problem: AttentionGradient, transposed: bool, rows: int, sums: list[Collected]
) -> HopperGradient.Variant:
    """The kernel of a problem."""
    of = problem.attention
    variant = variant_of(of.score, of.dtype, of.blocks[:2], of.features, transposed, rows)
    if sums and transposed and (variant.features > MOST_BESIDE_SUMS or of.score.dropout):
        variant = variant._replace(columns=32)
    collected = tuple((each.index, each.axes == "pair") for each in sums)
    pairs = [each.strides for each in sums if each.axes == "pair"]
    wide = all(stride % 2 == 0 for strides in pairs for stride in strides[:3])
    return variant._replace(collected=collected, wide_pairs=wide)


def variant_of(
    score: Score, dtype: str, block: tuple[int, int], features: int, transposed: bool, rows: int
) -> HopperGradient.Variant:
    """The kernel for blocks of a layout and so many features. Two results of more than 96 leave
    registers for 64 columns, but not beside the bits of a dropout or the slopes of a score."""
    block = block[::-1] if transposed else block
    variant = HopperGradient.Variant(dtype, block, width_of(features), transposed, 64, rows)
    narrow = variant.early and (score.dropout or score.has_score)
    return variant._replace(columns=32) if narrow else variant


def width_of(features: int) -> int:
    """Features of the kernel that so many take."""
    return next(width for width in WIDTHS if width >= features)


def fields(score: Score, collected: int) -> Fields:
    """What a plan fixes."""
    return text.fields(score, FIXED, collected)


def parameters(score: Score, collected: int) -> Parameters:
    """The parameter struct."""
    return text.parameters(POINTERS + collected, fields(score, collected), score, maps=4)


def _operand(problem: AttentionGradient, name: str) -> Operand:
    return problem.grad if name == "grad" else getattr(problem.attention, name)


def _shared(problem: AttentionGradient, names: tuple[str, str]) -> int:
    """Bits of what serves all heads, and all batches, of two operands: see parameters.cuh."""
    bits = 0
    for place, name in enumerate(names):
        t = _operand(problem, name)
        bits |= (int(not t.head) | int(not t.batch) << 1) << 2 * place
    return bits
