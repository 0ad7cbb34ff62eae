"""The result of a chain's first factor, computed again with each l of the second one by itself, for
the gradient of the second weight."""

from __future__ import annotations

from collections.abc import Iterator

from kernlib.families.kronecker_sparse.kernels.chain import fused_chain
from kernlib.families.kronecker_sparse.kernels.chain.fused_chain import ChainScope, Tiles
from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import Layout, Pattern, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step
from kernlib.lowering.wgmma import multiply

LANES = range(2, 9)
ROWS = 128  # of a tile
ROW = hopper_common.ROW_BYTES // 2  # elements of a swizzled row
MIN_STAGES = 2
FIXED = Fields((
    "int row_tiles",
    "int blocks", "int depth",  # of the first factor in a unit, and its c
    "int shares",  # of blocks of a group: units of the same rows and g
    "int span",  # k of a share
    "u32 units",
))  # fmt: skip
PARAMETERS = Parameters(0, FIXED.format, maps=3)


class Hidden(Kernel):
    """The first product of a chain, from shared memory to device memory."""

    role = "step"
    name = "hidden"
    header = "kronecker_sparse/hidden.cuh"
    entry = "kronecker_sparse_hidden"
    reason = "the first factor's result again, for gradients of a chain"
    Variant = Tiles

    def variant_of(self, first: Problem, second: Pattern, arch: str) -> Tiles | None:
        """How the kernel takes the first problem of a chain as it lies; None if it does not."""
        if arch != hopper_common.ARCH:
            return None
        variant = variant_of(first.dtype, _pattern(first), second)
        if variant is None or first.lanes > 1 or not fused_chain.is_read(first, variant):
            return None
        units = ceil_div(first.rows, ROWS) * first.blocks
        return variant if units <= hopper_common.MAX_TILES else None

    def step(self, first: Problem, second: Pattern, layout: Layout, gpu: Gpu) -> Step:
        """The launch that writes h of this layout, as the right operand of a gradient has it, to
        "h"."""
        variant = self.variant_of(first, second, gpu.arch)
        blocks, _, depth, lanes = second
        share = _share(_pattern(first), second)
        row_tiles = ceil_div(first.rows, ROWS)
        units = row_tiles * (first.blocks // share)
        sizes = (depth, lanes, first.rows, blocks)
        extent = tma.Extent(sizes, (layout.lane, layout.depth, layout.block))
        fixed = FIXED.values(
            row_tiles=row_tiles,
            blocks=share,
            depth=first.depth,
            shares=first.blocks // blocks // share,
            span=share * first.columns // lanes,
            units=units,
        )
        return Step(
            self.spec((), variant, gpu.arch),
            (min(gpu.multiprocessors, units), 1),
            PARAMETERS.pack(*fixed),
            (("x", 0), ("weight1", 0), ("h", 0)),
            maps=fused_chain.maps(first, variant) + hopper_common.maps(first.dtype, (extent, 64)),
        )

    def variants(self, subject: tuple, scope: ChainScope) -> Iterator[Tiles]:
        """Those of factors of the scope's patterns, one for each dtype."""
        dtypes = scope.dtypes if scope.arch == hopper_common.ARCH else ()
        every = (variant_of(dtype, *scope.patterns) for dtype in dtypes)
        return (variant for variant in every if variant is not None)

    def spec(self, subject: tuple, variant: Tiles, arch: str) -> KernelSpec:
        """The specification of a variant."""
        stages, shared = shared_memory(variant)
        words = [f"{ROWS}x{variant.first_columns}x{variant.lanes}"]
        words += [f"by {variant.quotient or 'block'}", f"depth={variant.chunks * ROW}"]
        facts = fused_chain.tile_facts(variant, stages) | {"PARAMETER_BYTES": PARAMETERS.size}
        texts = FIXED.text(), multiply(variant.dtype, variant.first_columns, False)
        source = self.source(facts, *texts, includes=hopper_common.INCLUDES)
        return self.named_spec(source, hopper_common.THREADS, shared, variant.dtype, words)


def variant_of(dtype: str, first: Pattern, second: Pattern) -> Tiles | None:
    """How the kernel takes two factors; None for those that it does not take."""
    quotient, lanes = fused_chain.quotient_of(dtype, first, second), second[3]
    if quotient is None or lanes not in LANES or first[1] > fused_chain.MOST_FIRST:
        return None
    chunks = ceil_div(_share(first, second) * first[1] // lanes, ROW)
    variant = Tiles(dtype, False, lanes, quotient, first[1], chunks, 0, 0, 2, 1)
    return variant if shared_memory(variant)[0] >= MIN_STAGES else None


def _pattern(first: Problem) -> Pattern:
    return first.blocks, first.columns, first.depth, 1


def _share(first: Pattern, second: Pattern) -> int:
    """Blocks of a unit: as few as have whole lines of k of each l, else all of a group."""
    blocks, columns = first[0] // second[0], first[1]
    counts = (count for count in range(1, blocks) if blocks % count == 0)
    return next((n for n in counts if n * columns % (ROW * second[3]) == 0), blocks)


def shared_memory(variant: Tiles) -> tuple[int, int]:
    """Stages that fit beside h, and bytes of all."""
    h = variant.lanes * variant.chunks * ROWS * hopper_common.ROW_BYTES
    return hopper_common.stages(h, variant.stage_bytes)
