"""Square blocks of 16, 32 and 64 of a product of dense matrices in half types, on Hopper, where
whole tiles are multiplied and the blocks of these that are stored are kept.

The copy engine wants strides of whole 16 bytes, and values lie slot behind slot; other layouts, and
few blocks, go to the other kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.sdd import operands, sampled
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

LISTS = ("row_bits", "row_ranks", "counts", "out")
FIELDS = Fields((
    "i64 batch_step",  # of values, in elements; slots lie side by side
    "u32 tiles",
    "int groups", "int panels", "int steps",  # tiles down and across a head; of 64 of the depth
    *operands.SIZES,
    "int unused",
))  # fmt: skip
TILE_LINES, TILE_COLUMNS, ROW = 128, 256, 64
STAGE_BYTES = (TILE_LINES + TILE_COLUMNS) * ROW * 2
WORDS = 2  # of a stage
# Stages, a part of each warpgroup's result, of each stage two barriers, and what lies in front of
# whole 1024 bytes.
RING = {
    **hopper.ring(STAGE_BYTES, WORDS),
    "OUT_BYTES": hopper.WARPGROUPS * hopper.PIECE_BYTES,
}
SHARED_BYTES = RING["STAGES"] * (STAGE_BYTES + 2 * 8 + 4 * WORDS) + RING["OUT_BYTES"] + 1024
MOST_TILES = 2**31 - 1

# Nanoseconds, of which only quotients count. Of an H100's 132 multiprocessors together a block by
# the other kernels and 64 of the depth, as measured in gradients at 4096 in all dimensions; of one
# of them a tile and 64 of the depth, by the same, and what its start and its stores take.
OTHERS_BLOCK, OTHERS_COUNT = {16: 0.31, 32: 0.82, 64: 2.4}, 132
STEP, START_STEPS = 720.0, 4


class Tiles(Kernel):
    """Tiles of 128 x 256 of the dense product, if they store a block."""

    role = "sdd"
    name = "tiles"
    header = "blocksparse/tiles/tiles.cuh"
    entry = "blocksparse_tiles"
    rank = 2
    reason = (
        "whole tiles of a dense product, sm_90a, half types: chosen where the layout has room "
        "for many blocks"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        block: int
        left_lines: bool
        right_lines: bool

    def takes(self, problem: Sdd, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        if problem.summands or not operands.is_of_squares(problem, arch):
            return False
        return _tiles(problem) <= MOST_TILES

    def pays(self, problem: Sdd, gpu: Gpu) -> bool:
        """Whether it takes less time than the other kernels, if all slots hold a block and no tile
        is without one."""
        count, steps = gpu.multiprocessors, ceil_div(problem.depth, ROW)
        time = ceil_div(_tiles(problem), count) * (steps + START_STEPS) * STEP
        blocks = problem.blocks
        others = blocks.capacity * problem.batch * steps * OTHERS_BLOCK[blocks.rows] * OTHERS_COUNT
        if blocks.rows < ROW:  # few blocks wait for their operands
            waiting = sampled.best_microseconds(problem, hopper.ARCH, count) - sampled.START
            others = max(others, 1000 * waiting * count)
        return time * count <= others

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Sdd, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a problem."""
        (down, across), tiles = _tiles_of_head(problem), _tiles(problem)
        numbers = FIELDS.values(
            batch_step=problem.values.batch,
            tiles=tiles,
            groups=down,
            panels=across,
            steps=ceil_div(problem.depth, ROW),
            **operands.sizes(problem),
            unused=0,
        )
        variant = self.Variant(problem.dtype, problem.blocks.rows, *operands.lines_last(problem))
        step = Step(
            self.spec(epilogue, variant, gpu.arch),
            (min(gpu.multiprocessors, tiles), 1),
            _parameters(epilogue).pack(*numbers),
            text.pointers(("a", "b", *LISTS), epilogue),
            text.scalar_count(epilogue),
            operands.maps(problem),
        )
        return Lowered((step,))

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of square blocks of one size, without summands."""
        rows, cols = scope.block
        is_square = rows == cols and rows in operands.SQUARES
        return {
            "dtype": hopper.halves(scope) if not text.summands(epilogue) else (),
            "block": [rows] if is_square else (),
            "left_lines": (False, True),
            "right_lines": (False, True),
        }

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, block, left, right = variant
        words = ["sdd", f"{block}x{block}", *operands.words(left, right)]
        facts = {
            **text.facts(dtype, dtype, epilogue),
            **RING,
            **operands.facts(left, right),
            "BLOCK": block,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        texts = (
            FIELDS.text(),
            text.typed_finish(epilogue),
            multiply(dtype, TILE_COLUMNS, False, left, right),
        )
        source = self.source(facts, *texts, includes=hopper.INCLUDES)
        return self.named_spec(source, hopper.THREADS, SHARED_BYTES, dtype, words, epilogue)


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """Maps, the layout's words, the result, the epilogue's numbers, sizes."""
    return text.parameters(len(LISTS), FIELDS.format, epilogue, maps=2)


def _tiles_of_head(problem: Sdd) -> tuple[int, int]:
    """Down and across."""
    blocks = problem.blocks
    return (
        ceil_div(blocks.rows * blocks.grid_rows, TILE_LINES),
        ceil_div(blocks.cols * blocks.grid_cols, TILE_COLUMNS),
    )


def _tiles(problem: Sdd) -> int:
    """Of all heads and batches."""
    down, across = _tiles_of_head(problem)
    return down * across * problem.blocks.heads * problem.batch
