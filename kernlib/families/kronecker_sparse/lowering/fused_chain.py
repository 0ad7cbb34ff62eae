"""The kernel of kernel_sources/kronecker_sparse/chain/chain.cuh: two factors in one launch, half
types, batch first, the first factor with d = 1.

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
MOST_FIRST = 128  # columns of a block's product, which a warpgroup has two of in registers
MOST_SUMS = 256  # l times columns of a tile of the second product: 128 registers
STAGE_BYTES = 32 * 1024  # of the second weight at most
PART_BYTES = 256  # of a staged line of y, at most but for 8 columns
PARTS = (32, 16, 8)  # columns of one
MIN_STAGES = 3
MOST_SPLITS = 8


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    lanes: int  # l of a warpgroup
    halves: int  # 2 where the warpgroups split l
    quotient: int  # features of a block with the same l; 0: blocks in their own order
    first_columns: int
    chunks: int  # rows of 128 bytes of an l of h
    second_columns: int
    second_depth: int
    part_columns: int  # that are staged together

    @property
    def span(self) -> int:
        return self.lanes * self.halves

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 if self.halves == 2 else 128


def variant_of(dtype: str, first: Pattern, second: Pattern) -> Variant | None:
    """How the kernel takes two factors; None for those that it does not."""
    a, b, c, d = first
    groups, columns, depth, lanes = second
    if dtype == "float32" or d != 1 or a % groups or b % 8 or c % 8 or depth % STEP:
        return None
    if lanes <= 8:
        span, halves, quotient = lanes, 1, b // lanes * (b % lanes == 0)
        quotient *= quotient % 8 == 0 or quotient in (1, 2, 4)
        first_columns = b
        if columns * lanes % 8:
            return None
    elif lanes % 16 == 0 and b % lanes == 0:
        span, halves, quotient = 8, 2, b // lanes
        first_columns = 8 * quotient
    else:
        return None
    if halves == 2 and quotient % 8 and quotient not in (1, 2, 4):
        return None
    if first_columns > MOST_FIRST or first_columns * halves > 256 or quotient > 256:
        return None
    second_columns = _second_columns(columns, span)
    second_depth = next(
        (n for n in (64, 32) if span * halves * second_columns * n * 2 <= STAGE_BYTES // halves), STEP
    )
    whole = [n for n in PARTS if second_columns % n == 0]
    part = next(n for n in whole if n * span * halves * 2 <= PART_BYTES or n == whole[-1])
    chunks = ceil_div(depth, hopper_common.row(dtype))
    variant = Variant(
        dtype, span, halves, quotient, first_columns, chunks, second_columns, second_depth, part
    )
    return variant if shared_memory(variant)[0] >= MIN_STAGES else None


def _second_columns(columns: int, lanes: int) -> int:
    """The widest tile among those that pad the columns least."""
    known = range(MOST_SUMS // lanes // 16 * 16, 15, -16)
    return min((n for n in known if n <= 128), key=lambda n: (round_up(columns, n), -n))


def takes(first: Problem, second: Problem, arch: str) -> Variant | None:
    """The variant for a chain of two problems; None where this kernel does not take it."""
    if arch != hopper_common.ARCH or first.dtype != second.dtype:
        return None
    patterns = [(p.blocks, p.columns, p.depth, p.lanes) for p in (first, second)]
    variant = variant_of(first.dtype, *patterns)
    if variant is None:
        return None
    x, weight = _extents(first, variant)
    left, right, out = first.left, first.right, second.out
    features = second.blocks * second.columns * second.lanes
    flat = out.column == second.lanes or second.columns == 1
    flat = flat and (out.lane == 1 or second.lanes == 1)
    flat = flat and (out.block == second.columns * second.lanes or second.blocks == 1)
    whole = out.row % 8 == 0 and out.alignment % 16 == 0 and features < 2**31
    dense = left.depth == 1 and right.depth == 1
    reads = tma.addressable(first.dtype, left.alignment, x)
    reads = reads and tma.addressable(first.dtype, right.alignment, weight)
    units = ceil_div(first.rows, variant.rows) * second.lanes * second.blocks * MOST_SPLITS
    if flat and whole and dense and reads and units <= hopper_common.MAX_TILES:
        return variant
    return None


def lower(
    epilogue: tuple[Epilogue, ...],
    first: Problem,
    second: Problem,
    variant: Variant,
    multiprocessors: int,
) -> Lowered:
    """The launches of a chain: the second weight packed, then both products."""
    packed = _packing(variant)
    row_tiles, spans = ceil_div(first.rows, variant.rows), packed.spans(second)
    tiles, groups = packed.tiles(second), second.blocks
    splits = _splits(first, second, row_tiles * spans * groups, tiles, multiprocessors)
    units = row_tiles * spans * groups * splits
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
        _maps(first, variant),
        overlaps=True,
    )
    packing = pack.step(second, packed)
    packing = packing._replace(pointers=(("weight2", 0), ("workspace", 0)))
    return Lowered((packing, main), packed.workspace(second))


def _splits(first: Problem, second: Problem, units: int, tiles: int, multiprocessors: int) -> int:
    """Shares of columns of the same rows: each computes h anew, but the last round of units is
    fuller."""
    groups = second.blocks
    of_h = first.blocks // groups * first.columns * first.depth
    of_y = second.lanes * second.columns * second.depth

    def cost(splits: int) -> float:
        rounds = ceil_div(units * splits, multiprocessors)
        return rounds * (of_h + of_y * ceil_div(tiles, splits) / tiles)

    return min(range(1, min(MOST_SPLITS, tiles) + 1), key=cost)


def _extents(first: Problem, variant: Variant) -> tuple[tma.Extent, tma.Extent]:
    """Of x and of the first weight, whose rows of each l are neighbours."""
    left, right, quotient = first.left, first.right, variant.quotient
    x = tma.Extent((first.depth, first.blocks, first.rows, 1), (left.block, left.line, 0))
    lanes = first.columns // quotient if quotient else 1
    sizes = (first.depth, first.columns // lanes, lanes, first.blocks)
    return x, tma.Extent(sizes, (right.line * lanes, right.line, right.block))


def _maps(first: Problem, variant: Variant) -> tuple[TensorMap, ...]:
    x, weight = _extents(first, variant)
    row = hopper_common.row(variant.dtype)
    lines = variant.first_columns * variant.halves
    box = (variant.quotient, variant.span) if variant.quotient else (lines, 1)
    return (
        tma.tensor_map(variant.dtype, x, (row, 1, variant.rows, 1)),
        tma.tensor_map(variant.dtype, weight, (row, *box, 1)),
    )


def _packing(variant: Variant) -> pack.Packing:
    return pack.Packing(
        variant.dtype, variant.second_columns, variant.second_depth, variant.span, 1
    )


def shared_memory(variant: Variant, vectors: int = 1) -> tuple[int, int]:
    """Stages that fit beside h, what is staged of y and ``vectors`` of epilogues, and bytes of
    all."""
    row_bytes = hopper_common.ROW_BYTES
    h = variant.span * variant.chunks * variant.rows * row_bytes
    line = variant.part_columns * variant.span * 2
    staged = variant.rows * (line + (160 - line % 128) % 128)
    staged += vectors * 2 * variant.second_columns * variant.lanes * 2
    of_first = (variant.rows + variant.first_columns * variant.halves) * row_bytes
    stage = round_up(max(of_first, _packing(variant).stage_bytes), hopper_common.SWIZZLE_BYTES)
    return hopper_common.stages(h + staged, stage)


def spec(epilogue: tuple[Epilogue, ...], variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    stages, shared = shared_memory(variant, len(text.vectors(epilogue)))
    words = [f"{variant.rows}x{variant.second_columns}x{variant.span}"]
    words += [f"first={variant.first_columns} by {variant.quotient or 'block'}"]
    words += [f"depth={variant.chunks * 64}"]
    made = KernelSpec(
        "kronecker_sparse",
        _source(epilogue, variant, stages),
        "kronecker_sparse_chain",
        hopper_common.THREADS,
        shared,
        description=text.describe(
            "kronecker_sparse", KIND, variant.dtype, "fp32", words, epilogue
        ),
    )
    return named(made, KIND, variant.dtype, *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, stages: int) -> str:
    """The generated CUDA text: types, ``Finish``, a few constants, the wgmma, one include."""
    widths = dict.fromkeys((variant.first_columns, variant.second_columns))
    products = "\n".join(multiply(variant.dtype, columns, False) for columns in widths)
    return f"""{hopper_common.preamble(variant.dtype, epilogue)}
constexpr int LANES = {variant.lanes};
constexpr int HALVES = {variant.halves};
constexpr int FIRST_COLUMNS = {variant.first_columns};
constexpr int H_CHUNKS = {variant.chunks};
constexpr int SECOND_COLUMNS = {variant.second_columns};
constexpr int SECOND_DEPTH = {variant.second_depth};
constexpr int PART_COLUMNS = {variant.part_columns};
constexpr int STAGES = {stages};
constexpr int PARAMETER_BYTES = {_parameters(epilogue).size};
#define QUOTIENT {variant.quotient}

#include "common/hopper.cuh"
{products}
#include "kronecker_sparse/chain/chain.cuh"
"""


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    return text.parameters(2, FIXED, epilogue, maps=2)
