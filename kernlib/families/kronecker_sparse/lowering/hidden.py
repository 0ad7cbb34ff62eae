"""The kernel of kernel_sources/kronecker_sparse/hidden.cuh: the result of a chain's first factor,
computed again with each l of the second one by itself, for the gradient of the second weight."""

from __future__ import annotations

from kernlib.families.kronecker_sparse.lowering import fused_chain, hopper_common
from kernlib.families.kronecker_sparse.lowering.fused_chain import Variant
from kernlib.families.kronecker_sparse.lowering.problem import Layout, Pattern, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Step
from kernlib.lowering.wgmma import multiply

KIND = "hidden"
LANES = range(2, 9)
ROWS = 128  # of a tile
ROW = hopper_common.ROW_BYTES // 2  # elements of a swizzled row
MIN_STAGES = 2
PARAMETERS = Parameters(0, "<5iI", maps=3)


def variant_of(dtype: str, first: Pattern, second: Pattern) -> Variant | None:
    """How the kernel takes two factors; None for those that it does not take."""
    quotient, lanes = fused_chain.quotient_of(dtype, first, second), second[3]
    if quotient is None or lanes not in LANES or first[1] > fused_chain.MOST_FIRST:
        return None
    chunks = ceil_div(_share(first, second) * first[1] // lanes, ROW)
    variant = Variant(dtype, False, lanes, quotient, first[1], chunks, 0, 0, 2, 1)
    return variant if shared_memory(variant)[0] >= MIN_STAGES else None


def takes(first: Problem, second: Pattern, arch: str) -> Variant | None:
    """:func:`variant_of` for the first problem of a chain as it lies."""
    if arch != hopper_common.ARCH:
        return None
    variant = variant_of(first.dtype, (first.blocks, first.columns, first.depth, 1), second)
    if variant is None or first.lanes > 1 or not fused_chain.is_read(first, variant):
        return None
    units = ceil_div(first.rows, ROWS) * first.blocks
    return variant if units <= hopper_common.MAX_TILES else None


def step(first: Problem, second: Pattern, layout: Layout, multiprocessors: int) -> Step:
    """The launch that writes h of this layout, as the right operand of a gradient has it, to
    "h"."""
    variant = takes(first, second, hopper_common.ARCH)
    blocks, _, depth, lanes = second
    share = _share((first.blocks, first.columns, first.depth, 1), second)
    row_tiles = ceil_div(first.rows, ROWS)
    units = row_tiles * (first.blocks // share)
    extent = tma.Extent(
        (depth, lanes, first.rows, blocks), (layout.lane, layout.depth, layout.block)
    )
    fixed = PARAMETERS.pack(
        row_tiles, share, first.depth, first.blocks // blocks // share,
        share * first.columns // lanes, units,
    )  # fmt: skip
    return Step(
        spec(variant),
        (min(multiprocessors, units), 1),
        fixed,
        (("x", 0), ("weight1", 0), ("h", 0)),
        maps=(
            *fused_chain.maps(first, variant),
            tma.tensor_map(first.dtype, extent, (ROW, 1, 64, 1)),
        ),
    )


def variants(patterns: tuple[Pattern, Pattern], arch: str, dtypes: list[str]) -> list[KernelSpec]:
    """Every spec that :func:`step` can choose for factors of these patterns."""
    if arch != hopper_common.ARCH:
        return []
    every = [variant_of(dtype, *patterns) for dtype in dtypes]
    return [spec(variant) for variant in every if variant is not None]


def _share(first: Pattern, second: Pattern) -> int:
    """Blocks of a unit: as few as have whole lines of k of each l, else all of a group."""
    blocks, columns = first[0] // second[0], first[1]
    counts = (count for count in range(1, blocks) if blocks % count == 0)
    return next((n for n in counts if n * columns % (ROW * second[3]) == 0), blocks)


def shared_memory(variant: Variant) -> tuple[int, int]:
    """Stages that fit beside h, and bytes of all."""
    row_bytes = hopper_common.ROW_BYTES
    stage = round_up((ROWS + variant.first_rows) * row_bytes, hopper_common.SWIZZLE_BYTES)
    return hopper_common.stages(variant.lanes * variant.chunks * ROWS * row_bytes, stage)


def spec(variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    stages, shared = shared_memory(variant)
    words = [f"{ROWS}x{variant.first_columns}x{variant.lanes}"]
    words += [f"by {variant.quotient or 'block'}", f"depth={variant.chunks * ROW}"]
    result = KernelSpec(
        "kronecker_sparse",
        _source(variant, stages),
        "kronecker_sparse_hidden",
        hopper_common.THREADS,
        shared,
        description=text.describe("kronecker_sparse", KIND, variant.dtype, "fp32", words, ()),
    )
    return named(result, variant.dtype, *words)


def _source(variant: Variant, stages: int) -> str:
    """The generated CUDA text: types, a few constants, the wgmma, one include."""
    return f"""#include "common/types.cuh"

using InputT = {DTYPES[variant.dtype].cuda};

constexpr int LANES = {variant.lanes};
constexpr int QUOTIENT = {variant.quotient};
constexpr int FIRST_COLUMNS = {variant.first_columns};
constexpr int H_CHUNKS = {variant.chunks};
constexpr int STAGES = {stages};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};
#define ORDER {variant.order}

#include "common/hopper.cuh"
{multiply(variant.dtype, variant.first_columns, False)}
#include "kronecker_sparse/hidden.cuh"
"""
