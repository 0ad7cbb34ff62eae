"""Attention by mma.sync, on every GPU, for every problem of half types.

A block of threads takes 64 or 128 rows of a head, and walks over tiles of 32 or 64 columns: the
larger ones reuse more of what comes from device memory, the smaller ones need fewer registers, less
shared memory and fewer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels.attention.base import (
    CHUNK,
    HALVES,
    SIDES,
    AttentionKernel,
    Scope,
    common_sizes,
    is_aligned,
    operand_strides,
)
from kernlib.families.blocksparse.lowering.attention import score_source as text
from kernlib.families.blocksparse.lowering.attention.problem import Attention, Score
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step

WIDTHS = tuple(range(16, 257, 16))  # of rows of q, k and v, with zeros behind them
MOST_CTAS = 2**31 - 1
WARPS = 4
NAMES = ("row_bits", "q", "k", "v", "out", "lse", "rest")
SIZES = (
    "int batch", "int heads",
    "int group",  # heads of q that share one of k and v
    "int queries", "int keys",
    "int grid_rows", "int row_words",  # of the layout: blocks of a column, words of a row
    "int grid_cols", "int col_words",
    "int layout_batch", "int layout_head",
    "int feature_chunks", "int value_chunks",  # of 16 bytes
    "int tiles",  # of a head
)  # fmt: skip
FIXED = (
    "Strides q_strides", "Strides k_strides", "Strides v_strides", "Strides out_strides", *SIZES
)  # fmt: skip


class Tile(NamedTuple):
    """Rows and columns of a tile, and blocks of threads that share a multiprocessor."""

    rows: int
    columns: int
    blocks: int


class Portable(AttentionKernel):
    """Weights are relative to the largest logit so far and never leave registers."""

    role = "forward"
    name = "portable"
    title = ""
    header = "blocksparse/attention/portable/portable.cuh"
    entry = "blocksparse_attention"
    rank = 1
    reason = "mma.sync on every GPU, half types: chosen for what `hopper` does not take"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the score."""

        dtype: str
        block: tuple[int, int]
        features: int  # multiples of 16
        values: int
        tile: Tile

    def takes(self, problem: Attention, arch: str) -> bool:
        """Whether the kernel computes a problem: all of half types whose rows are whole 16
        bytes."""
        operands = (problem.q, problem.k, problem.v, problem.out)
        widths = problem.features, problem.values
        return (
            problem.dtype in HALVES
            and all(side in SIDES for side in problem.blocks[:2])
            and all(16 <= width <= 256 and width % CHUNK == 0 for width in widths)
            and max(problem.queries, problem.keys) <= text.WIDEST
            and all(map(is_aligned, operands))
        )

    def choices(self, problem: Attention, arch: str) -> list[Choice]:
        """The tiles of a problem, most rows first."""
        return [{"rows": tile.rows} for tile in tiles(problem.score, *widths(problem), arch)]

    def default(self, problem: Attention, gpu: Gpu) -> Choice:
        """The largest that gives each multiprocessor a tile, and has no more rows than there
        are."""
        every, heads = self.choices(problem, gpu.arch), problem.batch * problem.heads
        for choice in every[:-1]:
            count = heads * problem.row_tiles(choice["rows"])
            if count >= gpu.multiprocessors and problem.queries > every[-1]["rows"]:
                return choice
        return every[-1]

    def launch(
        self, score: Score, problem: Attention, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a problem. Raises UnsupportedError for sizes that no grid can hold."""
        by_rows = {tile.rows: tile for tile in tiles(score, *widths(problem), gpu.arch)}
        tile = by_rows[int(choice["rows"])]
        variant = self.Variant(problem.dtype, problem.blocks[:2], *widths(problem), tile)
        fixed = text.fields(score, FIXED).pack(
            **text.strides(problem),
            **operand_strides(problem, "q", "k", "v", "out"),
            **sizes(problem, problem.row_tiles(tile.rows)),
        )
        step = Step(
            self.spec(score, variant, gpu.arch),
            (grid(problem.batch * problem.heads * problem.row_tiles(tile.rows)), 1),
            fixed,
            tuple((name, 0) for name in (*NAMES, *text.pointers(score))),
            len(text.SCALARS),
        )
        return Lowered((step,))

    def axes(self, score: Score, scope: Scope) -> Mapping[str, Iterable]:
        """Of blocks of one size."""
        features, values = (
            [round_up(width, 16)] if width else WIDTHS for width in (scope.features, scope.values)
        )
        every = (tiles(score, *each, scope.arch) for each in product(features, values))
        return {
            "dtype": scope.halves,
            "block": [scope.block],
            "features": features,
            "values": values,
            "tile": dict.fromkeys(tile for some in every for tile in some),
        }

    def is_legal(self, variant: Variant, score: Score, scope: Scope) -> bool:
        """Of the widths that a tile is for."""
        return variant.tile in tiles(score, variant.features, variant.values, scope.arch)

    def spec(self, score: Score, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, (rows, cols), features, values, tile = variant
        words = [self.name, dtype, f"{rows}x{cols}", f"{features}/{values}", f"{tile.rows} rows"]
        facts = {
            "WARPS": WARPS,
            "FRAGMENTS": tile.rows // WARPS // 16,
            "TILE_COLS": tile.columns,
            "BLOCK_ROWS": rows,
            "BLOCK_COLS": cols,
            "FEATURES": features,
            "VALUES": values,
            "MIN_BLOCKS": tile.blocks,
            "PARAMETER_BYTES": parameters(score).size,
        }
        return self.score_spec(
            score,
            variant,
            facts,
            text.fields(score, FIXED),
            threads=32 * WARPS,
            shared=shared_bytes(features, values, tile),
            words=words + text.words(score),
        )


def widths(problem: Attention) -> tuple[int, int]:
    """Of rows of q and k, and of v, in shared memory."""
    return round_up(problem.features, 16), round_up(problem.values, 16)


def tiles(score: Score, features: int, values: int, arch: str) -> list[Tile]:
    """Those that a GPU has shared memory and registers for, most rows first. 32 rows a warp hold
    the sums of 128 values at most, of 64 beside the text of a score; and of more than 32 the logits
    of 64 columns where there is neither a score nor a dropout."""
    width = max(features, values)
    is_plain = not (score.text or score.dropout)
    wide = width <= 32 or (width <= 64 and is_plain)
    large = [Tile(128, 64 if wide else 32, 2)] if width <= (64 if score.text else 128) else []
    every = [*large, Tile(64, 64, 2) if width <= 128 else Tile(64, 32, 1)]
    return [t for t in every if shared_bytes(features, values, t) <= targets.SHARED_BYTES[arch]]


def grid(count: int) -> int:
    """So many blocks of threads, one if there are none. Raises UnsupportedError for too many."""
    if count > MOST_CTAS:
        raise UnsupportedError(
            f"attention of so many heads and rows has {count} tiles, more than the {MOST_CTAS} of "
            "a launch: give parts of the batch"
        )
    return max(1, count)


def sizes(problem: Attention, tiles: int) -> dict[str, int]:
    """The values of SIZES, of so many tiles of a head."""
    of_blocks = ("grid_rows", "row_words", "grid_cols", "col_words")
    return {
        **common_sizes(problem),
        "batch": problem.batch,
        **{name: getattr(problem.blocks, name) for name in of_blocks},
        "feature_chunks": problem.features // CHUNK,
        "value_chunks": problem.values // CHUNK,
        "tiles": max(1, tiles),
    }


def pitch(width: int) -> int:
    """Bytes of a row in shared memory."""
    return 2 * width + 16


def shared_bytes(features: int, values: int, tile: Tile) -> int:
    """Rows of q, k and v, or the results that take their place."""
    stages = (tile.rows + tile.columns) * pitch(features) + tile.columns * pitch(values)
    return max(stages, tile.rows * pitch(values))


def parameters(score: Score) -> Parameters:
    """The parameter struct."""
    return text.parameters(len(NAMES), text.fields(score, FIXED), score)
