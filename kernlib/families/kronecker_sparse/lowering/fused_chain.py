"""The kernel of kernel_sources/kronecker_sparse/fused_chain/fused_chain.cuh: two factors in one
launch, half types, batch first, the first factor with d = 1.

The second weight is packed for it, as for the kernels of one factor.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import hopper_common, pack
from kernlib.families.kronecker_sparse.lowering.problem import Pattern, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

KIND = "chain"
FIXED = "<q12i"  # struct Fixed
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


class Variant(NamedTuple):
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


def variants_of(
    epilogue: tuple[Epilogue, ...], dtype: str, first: Pattern, second: Pattern
) -> list[Variant]:
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
        variant = Variant(
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
    """Of a :class:`Variant`; None for factors whose first product no kernel takes."""
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


def takes(
    epilogue: tuple[Epilogue, ...], first: Problem, second: Problem, arch: str
) -> list[Variant]:
    """The variants for a chain of two problems, none where this kernel does not take it."""
    if arch != hopper_common.ARCH or first.dtype != second.dtype:
        return []
    patterns = [(p.blocks, p.columns, p.depth, p.lanes) for p in (first, second)]
    variants = variants_of(epilogue, first.dtype, *patterns)
    if not variants:
        return []
    out = second.out
    features = second.blocks * second.columns * second.lanes
    is_flat = out.column == second.lanes or second.columns == 1
    is_flat = is_flat and (out.lane == 1 or second.lanes == 1)
    is_flat = is_flat and (out.block == second.columns * second.lanes or second.blocks == 1)
    is_aligned = out.row % 8 == 0 and out.alignment % 16 == 0
    units = ceil_div(first.rows, 64) * second.lanes * second.blocks * MOST_SPLITS
    is_counted = units <= hopper_common.MAX_TILES and features < 2**31
    return variants if is_flat and is_aligned and is_read(first, variants[0]) and is_counted else []


def lower(
    epilogue: tuple[Epilogue, ...],
    first: Problem,
    second: Problem,
    variants: list[Variant],
    multiprocessors: int,
) -> Lowered | None:
    """The launches of a chain by the best of ``variants``: the second weight packed, then both
    products. None where there are so few tiles that half of the multiprocessors would be idle:
    kernels of one factor have more."""
    variant, splits = _fastest(first, second, variants, multiprocessors)
    packed = _packing(variant)
    row_tiles, spans, tiles = _tiles(first, second, variant)
    groups = second.blocks
    units = row_tiles * spans * groups * splits
    if 2 * units < multiprocessors:
        return None
    fixed = _parameters(epilogue).pack(
        second.out.row, row_tiles, spans, splits, first.rows, first.blocks // groups, first.depth,
        second.columns, second.lanes, second.depth, tiles, units, 0,
    )  # fmt: skip
    pointers = (("x", 0), ("weight1", 0), ("workspace", 0), ("out", 0))
    main = Step(
        spec(epilogue, variant),
        (min(multiprocessors, units), 1),
        fixed,
        (*pointers, *text.vector_pointers(epilogue)),
        text.scalar_count(epilogue),
        maps(first, variant),
        overlaps=True,
    )
    packing = pack.step(second, packed)
    packing = packing._replace(pointers=(("weight2", 0), ("workspace", 0)))
    return Lowered((packing, main), packed.workspace(second))


def variants(
    epilogue: tuple[Epilogue, ...], patterns: tuple[Pattern, Pattern], arch: str, dtypes: list[str]
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for factors of these patterns."""
    if arch != hopper_common.ARCH:
        return []
    every = [each for dtype in dtypes for each in variants_of(epilogue, dtype, *patterns)]
    specs = [spec(epilogue, variant) for variant in every]
    packings = dict.fromkeys(map(_packing, every))
    return specs + list(dict.fromkeys(each for one in packings for each in pack.specs(one)))


def _tiles(first: Problem, second: Problem, variant: Variant) -> tuple[int, int, int]:
    """Tiles of rows, of l and of columns."""
    packed = _packing(variant)
    return ceil_div(first.rows, variant.rows), packed.spans(second), packed.tiles(second)


def _fastest(
    first: Problem, second: Problem, variants: list[Variant], multiprocessors: int
) -> tuple[Variant, int]:
    """The variant, and the shares of columns, whose multiprocessors have the least to multiply.
    Each share of the same rows computes h anew, but the last round of units is fuller."""
    groups = second.blocks
    of_h = first.blocks // groups * first.columns * first.depth
    of_y = second.lanes * second.columns * second.depth

    def cost(pair: tuple[Variant, int]) -> float:
        variant, splits = pair
        row_tiles, spans, tiles = _tiles(first, second, variant)
        rounds = ceil_div(row_tiles * spans * groups * splits, multiprocessors)
        share = ceil_div(tiles, splits) / tiles
        return rounds * variant.rows * (of_h + of_y * share) / spans

    pairs = [
        (variant, splits)
        for variant in variants
        for splits in range(1, min(MOST_SPLITS, _tiles(first, second, variant)[2]) + 1)
    ]
    return min(pairs, key=cost)


def is_read(first: Problem, variant: Variant) -> bool:
    """Whether the copy engine reads x and the first weight as they lie."""
    left, right = first.left, first.right
    x, weight = _extents(first, variant)
    return (
        left.depth == right.depth == 1
        and tma.addressable(first.dtype, left.alignment, x)
        and tma.addressable(first.dtype, right.alignment, weight)
    )


def _extents(first: Problem, variant: Variant) -> tuple[tma.Extent, tma.Extent]:
    """Of x and of the first weight, whose rows of each l are neighbours."""
    left, right, quotient = first.left, first.right, variant.quotient
    x = tma.Extent((first.depth, first.blocks, first.rows, 1), (left.block, left.line, 0))
    lanes = first.columns // quotient if quotient else 1
    sizes = (first.depth, first.columns // lanes, lanes, first.blocks)
    return x, tma.Extent(sizes, (right.line * lanes, right.line, right.block))


def maps(first: Problem, variant: Variant) -> tuple[TensorMap, ...]:
    """Of x and of the first weight."""
    x, weight = _extents(first, variant)
    row = hopper_common.row(variant.dtype)
    box = (variant.quotient, variant.span) if variant.quotient else (variant.first_rows, 1)
    return (
        tma.tensor_map(variant.dtype, x, (row, 1, 64 if variant.pairs == 3 else variant.rows, 1)),
        tma.tensor_map(variant.dtype, weight, (row, *box, 1)),
    )


def _packing(variant: Variant) -> pack.Packing:
    return pack.Packing(
        variant.dtype, variant.second_columns, variant.second_depth, variant.span, 1
    )


def shared_memory(variant: Variant, vectors: int) -> tuple[int, int]:
    """Stages that fit beside h, what is staged of y and ``vectors`` of epilogues, and bytes of
    all."""
    row_bytes = hopper_common.ROW_BYTES
    h = variant.span * variant.chunks * variant.rows * row_bytes
    line = 16 * variant.lanes  # bytes of 8 columns
    warpgroups = variant.pairs * variant.groups
    staged = 64 * (warpgroups * (line + 32) + 64) if variant.wide else 0
    if not variant.wide and not variant.direct:
        staged = 64 * warpgroups * (line + (0 if variant.lanes % 2 else 16))
    staged += vectors * warpgroups * 2 * variant.columns * variant.lanes * 2
    of_first = (variant.rows + variant.first_rows) * row_bytes
    stage = round_up(max(of_first, _packing(variant).stage_bytes), hopper_common.SWIZZLE_BYTES)
    if variant.pairs == 3:
        stage = 2 * BOX_BYTES
    return hopper_common.stages(h + staged, stage)


def spec(epilogue: tuple[Epilogue, ...], variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    stages, shared = shared_memory(variant, len(text.vectors(epilogue)))
    words = [f"{variant.rows}x{variant.second_columns}x{variant.span}"]
    words += [f"first={variant.first_columns} by {variant.quotient or 'block'}"]
    words += [f"depth={variant.chunks * 64}"]
    result = KernelSpec(
        "kronecker_sparse",
        _source(epilogue, variant, stages),
        "kronecker_sparse_chain",
        128 * (variant.pairs * variant.groups + 1),
        shared,
        description=text.describe("kronecker_sparse", KIND, variant.dtype, "fp32", words, epilogue),
    )
    return named(result, KIND, variant.dtype, *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, stages: int) -> str:
    """The generated CUDA text: types, ``Finish``, a few constants, the wgmma, one include."""
    widths = dict.fromkeys((variant.first_share, variant.columns))
    products = "\n".join(multiply(variant.dtype, columns, False) for columns in widths)
    return f"""{text.preamble(variant.dtype, variant.dtype, epilogue)}
constexpr int PAIRS = {variant.pairs};
constexpr int GROUPS = {variant.groups};
constexpr int LANES = {variant.lanes};
constexpr int QUOTIENT = {variant.quotient};
constexpr int FIRST_COLUMNS = {variant.first_columns};
constexpr int FIRST_SHARE = {variant.first_share};
constexpr int H_CHUNKS = {variant.chunks};
constexpr int COLUMNS = {variant.columns};
constexpr int SECOND_DEPTH = {variant.second_depth};
constexpr int STAGES = {stages};
constexpr int PARAMETER_BYTES = {_parameters(epilogue).size};
#define WIDE {int(variant.wide)}
#define ORDER {variant.order}
#define DIRECT {int(variant.direct)}

#include "common/hopper.cuh"
{products}
#include "kronecker_sparse/fused_chain/fused_chain.cuh"
"""


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    return text.parameters(2, FIXED, epilogue, maps=2)
