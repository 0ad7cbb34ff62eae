"""Two factors in one launch: half types, batch first, the first factor with d = 1.

The second weight is packed for it, as for the kernels of one factor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.steps.pack import Pack, Packing
from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import Pattern, Problem, is_flat
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import kernel, tma
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

STEP = 16  # k of one wgmma
MOST_FIRST = 128  # columns of a block's product
MOST_SHARE = 64  # of them that each of two warpgroups of a pair computes: 32 registers
# l times columns of a warpgroup's tile, two for each register: by whether it is wide, and by how
# many warpgroups there are.
MOST_SUMS = {(False, 2): 192, (False, 3): 128, (False, 4): 96, (True, 4): 128}
BOX_BYTES = 64 * hopper_common.ROW_BYTES  # of one copy of x for three pairs
QUOTIENTS = (1, 2, 4)  # below 8
STAGE_BYTES = 32 * 1024  # of the second weight at most
MIN_STAGES = {2: 3, 3: 4}  # by pairs; three have two stages for one of the first product
MOST_SPLITS = 8


FIXED = Fields((
    "i64 y_row",  # from row to row of y
    "int row_tiles", "int spans", "int splits",  # units of a group
    "int rows",  # batch
    "int blocks", "int depth",  # of the first factor in a group, and its c
    "int columns", "int lanes",  # of the second factor: b, d
    "int second_depth",  # its c
    "int column_tiles",  # of SECOND_COLUMNS
    "u32 units",
    "int unused",
))  # fmt: skip


class Tiles(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    wide: bool  # whether a unit has 16 l of more
    lanes: int  # of a warpgroup
    quotient: int  # features of a block with the same l; 0: blocks in their own order
    first_columns: int  # of a pair of warpgroups
    chunks: int  # rows of 128 bytes of an l of h
    columns: int  # of a warpgroup's tile of the second product
    second_depth: int
    pairs: int  # of warpgroups
    groups: int  # warpgroups of a pair: 2 where finishing y takes long, with few registers each

    @property
    def span(self) -> int:
        """l of a unit."""
        return self.pairs * self.groups * self.lanes if self.wide else self.lanes

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 if self.wide else 64 * self.pairs

    @property
    def order(self) -> int:
        """How a block's features lie: by l in eights, by l in fewer, or as they are."""
        return 0 if not self.quotient else 1 if self.quotient % 8 else 2

    @property
    def direct(self) -> bool:
        """Whether y goes to memory as a thread has it, not through shared memory."""
        return not self.wide and self.lanes in (1, 2, 4, 8)

    @property
    def second_columns(self) -> int:
        """Columns of all warpgroups' tiles."""
        return self.columns if self.wide else self.groups * self.columns

    @property
    def first_share(self) -> int:
        """Columns of a block's product that a warpgroup computes."""
        return self.first_columns // (self.groups if self.first_columns > MOST_SHARE else 1)

    @property
    def first_rows(self) -> int:
        """Rows of the first weight of a block."""
        return 2 * self.first_columns if self.wide else self.first_columns

    @property
    def stage_bytes(self) -> int:
        """Of a stage of the ring, which has room for either product's."""
        if self.pairs == 3:
            return 2 * BOX_BYTES
        of_first = (self.rows + self.first_rows) * hopper_common.ROW_BYTES
        most = max(of_first, packing_of(self).stage_bytes) if self.columns else of_first
        return round_up(most, hopper_common.SWIZZLE_BYTES)


class Chain(NamedTuple):
    """What is computed: two problems, and the epilogue of the second one."""

    first: Problem
    second: Problem
    epilogue: tuple[Epilogue, ...]

    @property
    def patterns(self) -> list[Pattern]:
        return [(p.blocks, p.columns, p.depth, p.lanes) for p in self[:2]]


class ChainScope(NamedTuple):
    """What is known of chains whose kernels are compiled ahead."""

    patterns: tuple[Pattern, Pattern]
    dtypes: tuple[str, ...]
    arch: str


class FusedChain(Kernel):
    """What a first product leaves in shared memory is the left operand of the second one."""

    role = "chain"
    name = "chain"
    header = "kronecker_sparse/fused_chain/fused_chain.cuh"
    entry = "kronecker_sparse_chain"
    reason = (
        "two factors in one launch, where what lies between them fits shared memory and rows "
        "are enough for half of the multiprocessors"
    )
    Variant = Tiles

    def takes(self, problem: Chain, arch: str) -> bool:
        """Whether the kernel computes a chain."""
        first, second, epilogue = problem
        if arch != hopper_common.ARCH or first.dtype != second.dtype:
            return False
        variants = variants_of(epilogue, first.dtype, *problem.patterns)
        out = second.out
        features = second.blocks * second.columns * second.lanes
        is_aligned = out.row % 8 == 0 and out.alignment % 16 == 0
        units = ceil_div(first.rows, 64) * second.lanes * second.blocks * MOST_SPLITS
        is_counted = units <= hopper_common.MAX_TILES and features < 2**31
        if not variants or not is_aligned or not is_counted:
            return False
        is_written = is_flat(second, second.columns, out.lane, out.column, out.block)
        return is_written and is_read(first, variants[0])

    def choices(self, problem: Chain, arch: str) -> list[Choice]:
        """Pairs of warpgroups, warpgroups of each, and shares of the columns: each share of the
        same rows computes h anew, but the last round of units is fuller."""
        first, second, epilogue = problem
        variants = variants_of(epilogue, first.dtype, *problem.patterns)
        return [
            {"pairs": tiles.pairs, "groups": tiles.groups, "splits": splits}
            for tiles in variants
            for splits in range(1, min(MOST_SPLITS, packing_of(tiles).tiles(second)) + 1)
        ]

    def default(self, problem: Chain, gpu: Gpu) -> Choice:
        """The choice of the least estimate."""
        every = self.choices(problem, gpu.arch)
        return min(every, key=lambda choice: self.estimate(problem, choice, gpu))

    def pays(self, problem: Chain, gpu: Gpu) -> bool:
        """Whether there are tiles for half of the multiprocessors: kernels of one factor have
        more."""
        tiles, splits = _tiles_of(problem, self.default(problem, gpu))
        row_tiles, spans, _ = _counts(problem, tiles)
        units = row_tiles * spans * problem.second.blocks * splits
        return 2 * units >= gpu.multiprocessors

    def estimate(self, problem: Chain, choice: Mapping[str, int], gpu: Gpu) -> float:
        """What a multiprocessor has to multiply, in numbers, which choices are compared by."""
        tiles, splits = _tiles_of(problem, choice)
        first, second, _ = problem
        groups = second.blocks
        of_h = first.blocks // groups * first.columns * first.depth
        of_y = second.lanes * second.columns * second.depth
        row_tiles, spans, column_tiles = _counts(problem, tiles)
        rounds = ceil_div(row_tiles * spans * groups * splits, gpu.multiprocessors)
        share = ceil_div(column_tiles, splits) / column_tiles
        return rounds * tiles.rows * (of_h + of_y * share) / spans

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Chain, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a chain: the second weight packed, then both products."""
        tiles, splits = _tiles_of(problem, choice)
        first, second, _ = problem
        packing, groups = packing_of(tiles), second.blocks
        row_tiles, spans, column_tiles = _counts(problem, tiles)
        units = row_tiles * spans * groups * splits
        fixed = FIXED.values(
            y_row=second.out.row,
            row_tiles=row_tiles,
            spans=spans,
            splits=splits,
            rows=first.rows,
            blocks=first.blocks // groups,
            depth=first.depth,
            columns=second.columns,
            lanes=second.lanes,
            second_depth=second.depth,
            column_tiles=column_tiles,
            units=units,
            unused=0,
        )
        main = Step(
            self.spec(epilogue, tiles, gpu.arch),
            (min(gpu.multiprocessors, units), 1),
            _parameters(epilogue).pack(*fixed),
            text.pointers(("x", "weight1", "workspace", "out"), epilogue),
            text.scalar_count(epilogue),
            maps(first, tiles),
            overlaps=True,
        )
        packs = Pack().step(second, packing)
        packs = packs._replace(pointers=(("weight2", 0), ("workspace", 0)))
        return Lowered((packs, main), packing.workspace(second))

    def variants(self, epilogue: tuple[Epilogue, ...], scope: ChainScope) -> Iterator[Tiles]:
        """Those of factors of the scope's patterns, which fix nearly all."""
        for dtype in scope.dtypes if scope.arch == hopper_common.ARCH else ():
            yield from variants_of(epilogue, dtype, *scope.patterns)

    def specs(
        self, epilogue: tuple[Epilogue, ...], scope: ChainScope, arch: str
    ) -> list[KernelSpec]:
        """The specifications of all variants, and of what packs the second weight."""
        packs = Pack().specs_of(map(packing_of, self.variants(epilogue, scope)))
        return super().specs(epilogue, scope, arch) + packs

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Tiles, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype = variant.dtype
        stages, shared = shared_memory(variant, len(text.vectors(epilogue)))
        words = [f"{variant.rows}x{variant.second_columns}x{variant.span}"]
        words += [f"first={variant.first_columns} by {variant.quotient or 'block'}"]
        words += [f"depth={variant.chunks * 64}"]
        facts = {
            **text.facts(dtype, dtype, epilogue),
            **tile_facts(variant, stages),
            "COLUMNS": variant.columns,
            "SECOND_DEPTH": variant.second_depth,
            "DIRECT": variant.direct,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        widths = dict.fromkeys((variant.first_share, variant.columns))
        products = [multiply(dtype, columns, False) for columns in widths]
        texts = FIXED.text(), text.typed_finish(epilogue), *products
        source = self.source(facts, *texts, includes=hopper_common.INCLUDES)
        threads = 128 * (variant.pairs * variant.groups + 1)
        return self.named_spec(source, threads, shared, dtype, words, epilogue)


def lower(problem: Chain, gpu: Gpu) -> Lowered | None:
    """The launches of a chain; None where the kernel does not take it, or has too few tiles."""
    chain = FusedChain()
    option = kernel.choose([chain], problem, gpu)
    if option is None or not chain.pays(problem, gpu):
        return None
    return chain.launch(problem.epilogue, problem, gpu, option.knobs)


def tile_facts(tiles: Tiles, stages: int) -> dict[str, Fact]:
    """Of the first product."""
    return {
        "InputT": DTYPES[tiles.dtype].cuda,
        "WIDE": tiles.wide,
        "PAIRS": tiles.pairs,
        "GROUPS": tiles.groups,
        "LANES": tiles.lanes,
        "QUOTIENT": tiles.quotient,
        "ORDER": tiles.order,
        "FIRST_COLUMNS": tiles.first_columns,
        "FIRST_SHARE": tiles.first_share,
        "H_CHUNKS": tiles.chunks,
        "STAGES": stages,
        "STAGE_BYTES": tiles.stage_bytes,
    }


def _tiles_of(problem: Chain, choice: Mapping[str, int]) -> tuple[Tiles, int]:
    """The variant and the shares of columns of a choice."""
    first, _, epilogue = problem
    pairs, groups, splits = (int(choice[name]) for name in ("pairs", "groups", "splits"))
    variants = variants_of(epilogue, first.dtype, *problem.patterns)
    return next(each for each in variants if (each.pairs, each.groups) == (pairs, groups)), splits


def _counts(problem: Chain, tiles: Tiles) -> tuple[int, int, int]:
    """Tiles of rows, of l and of columns."""
    first, second, _ = problem
    packing = packing_of(tiles)
    return ceil_div(first.rows, tiles.rows), packing.spans(second), packing.tiles(second)


def variants_of(
    epilogue: tuple[Epilogue, ...], dtype: str, first: Pattern, second: Pattern
) -> list[Tiles]:
    """How the kernel can take two factors, by preference; none for those that it does not take."""
    b = first[1]
    _, columns, depth, lanes = second
    quotient = quotient_of(dtype, first, second)
    if quotient is None:
        return []
    wide = lanes > 8
    if (wide and (lanes % 16 or not quotient)) or columns * lanes % 8 or columns % 2:
        return []
    first_columns = 8 * quotient if wide else b
    if first_columns > MOST_FIRST:
        return []
    lanes = 4 if wide else lanes
    chunks = ceil_div(depth, hopper_common.row(dtype))
    is_costly, vectors = not hopper_common.is_cheap(epilogue), len(text.vectors(epilogue))
    variants = []
    for pairs, groups in ((2, 2),) if wide else ((3, 1), (2, 2 if is_costly else 1)):
        most = MOST_SUMS[wide, pairs * groups] // lanes
        width = _columns(columns, min(most, 128), 1 if wide else groups)
        variant = Tiles(
            dtype, wide, lanes, quotient, first_columns, chunks, width, STEP, pairs, groups
        )
        most = (2 * BOX_BYTES if pairs == 3 else STAGE_BYTES) // (
            variant.span * variant.second_columns * 2
        )
        depths = (n for n in (64, 32) if n <= most and not wide)
        variant = variant._replace(second_depth=next(depths, STEP))
        is_shared = groups == 2 and first_columns > MOST_SHARE
        fits = shared_memory(variant, vectors)[0] >= MIN_STAGES[pairs] and not (
            is_shared and first_columns % 16
        )
        if fits and not (pairs == 3 and first_columns > MOST_SHARE):
            variants.append(variant)
    return variants


def quotient_of(dtype: str, first: Pattern, second: Pattern) -> int | None:
    """Of :class:`Tiles`; None for factors whose first product no kernel takes."""
    a, b, c, d = first
    blocks, _, depth, lanes = second
    if dtype == "float32" or d != 1 or a % blocks or b % 8 or c % 8 or depth % STEP:
        return None
    quotient = b // lanes if b % lanes == 0 else 0
    return quotient if quotient % 8 == 0 or quotient in QUOTIENTS else 0


def _columns(count: int, most: int, groups: int) -> int:
    """The widest tile of a warpgroup among those that pad the columns of ``groups`` least."""
    widths = range(most // 8 * 8, 7, -8)
    return min(widths, key=lambda n: (round_up(count, n * groups), -n))


def is_read(first: Problem, variant: Tiles) -> bool:
    """Whether the copy engine reads x and the first weight as they lie."""
    left, right = first.left, first.right
    x, weight = _extents(first, variant)
    return (
        left.depth == right.depth == 1
        and tma.addressable(first.dtype, left.alignment, x)
        and tma.addressable(first.dtype, right.alignment, weight)
    )


def _extents(first: Problem, variant: Tiles) -> tuple[tma.Extent, tma.Extent]:
    """Of x and of the first weight, whose rows of each l are neighbours."""
    left, right, quotient = first.left, first.right, variant.quotient
    x = tma.Extent((first.depth, first.blocks, first.rows, 1), (left.block, left.line, 0))
    lanes = first.columns // quotient if quotient else 1
    sizes = (first.depth, first.columns // lanes, lanes, first.blocks)
    return x, tma.Extent(sizes, (right.line * lanes, right.line, right.block))


def maps(first: Problem, variant: Tiles) -> tuple[TensorMap, ...]:
    """Of x and of the first weight."""
    x, weight = _extents(first, variant)
    row = hopper_common.row(variant.dtype)
    box = (variant.quotient, variant.span) if variant.quotient else (variant.first_rows, 1)
    return (
        tma.tensor_map(variant.dtype, x, (row, 1, 64 if variant.pairs == 3 else variant.rows, 1)),
        tma.tensor_map(variant.dtype, weight, (row, *box, 1)),
    )


def packing_of(variant: Tiles) -> Packing:
    return Packing(variant.dtype, variant.second_columns, variant.second_depth, variant.span, 1)


def shared_memory(variant: Tiles, vectors: int) -> tuple[int, int]:
    """Stages that fit beside h, what is staged of y and ``vectors`` of epilogues, and bytes of
    all."""
    h = variant.span * variant.chunks * variant.rows * hopper_common.ROW_BYTES
    line = 16 * variant.lanes  # bytes of 8 columns
    warpgroups = variant.pairs * variant.groups
    staged = 64 * (warpgroups * (line + 32) + 64) if variant.wide else 0
    if not variant.wide and not variant.direct:
        staged = 64 * warpgroups * (line + (0 if variant.lanes % 2 else 16))
    staged += vectors * warpgroups * 2 * variant.columns * variant.lanes * 2
    return hopper_common.stages(h + staged, variant.stage_bytes)


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    return text.parameters(2, FIXED.format, epilogue, maps=2)
