"""Products of a block-sparse and a dense matrix by mma.sync, for any strides, on every GPU.

A block of threads takes 128 lines of the result, which are one to eight lines of blocks, by up to
128 columns; few columns take smaller tiles, down to 32 lines by 16 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels import parts
from kernlib.families.blocksparse.lowering import mma, summands
from kernlib.families.blocksparse.lowering.mma import CHUNK_BYTES, Rate
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Constant
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered, Step

OPERANDS = ("row_bits", "row_ranks", "col_bits", "values", "dense", "out")
FIXED = (
    "Side values_view",  # panels are slots, columns depths
    "Side dense_view", "Side out_view",  # a line of dense is a depth
    "i64 lines", "i64 columns",  # of a head's result
    "Grid grid",
    "i64 part_stride",  # PARTIAL: elements from one part's sums to the next one's
    "u32 line_tiles", "u32 column_tiles",  # of a head
    "u32 tiles", "u32 part_blocks",  # of all heads; of a part of the depth
    "u32 batch",
    # For gathers: which neighbours lie closer together.
    "u32 values_depth_first", "u32 dense_depth_first",
    "u32 whole_stores",  # of Target
)  # fmt: skip


class Tile(NamedTuple):
    """Lines and columns of a block of threads and of a warp; bytes of depth in a stage, and how
    many stages are under way where shared memory is small; blocks that share a multiprocessor."""

    lines: int
    columns: int
    warp_lines: int
    warp_columns: int
    depth_bytes: int
    stages: int
    blocks: int

    @property
    def warps(self) -> int:
        return self.lines // self.warp_lines * (self.columns // self.warp_columns)


# Largest first. 3xTF32 keeps two sums for each of its outputs, and has no registers for the first
# ones.
TILES = (
    Tile(128, 128, 128, 32, 64, 3, 2),
    Tile(128, 64, 64, 32, 64, 3, 2),
    Tile(64, 32, 16, 32, 128, 3, 2),
    Tile(32, 16, 16, 16, 128, 5, 4),
)
SPLIT_TILES = (Tile(64, 64, 32, 32, 64, 3, 3), *TILES[2:])

# What their stages take, by whether numbers are split, and by columns; and how many times as long
# where blocks have but 16 along the depth.
RATES = {
    (False, 128): (Rate(0.75, 0.40, 4), 1.13),
    (False, 64): (Rate(0.61, 0.14, 3), 1.0),
    (False, 32): (Rate(0.59, 0.14, 3), 1.18),
    (False, 16): (Rate(0.43, 0.09, 4), 1.78),
    (True, 64): (Rate(0.85, 0.33, 5), 1.0),
    (True, 32): (Rate(1.10, 0.30, 3), 1.0),
    (True, 16): (Rate(0.96, 0.05, 5), 1.26),
}
START, FILLING = 3.5, 1.1  # microseconds of a launch without stages; stages until one is multiplied
PARTS_COLUMNS = 64  # of the widest tile that takes parts of sums


class Portable(Kernel):
    """Lines of a tile share the panels of the dense operand that some of their blocks want."""

    role = "spmm"
    name = "portable"
    header = "blocksparse/portable/portable.cuh"
    entry = "blocksparse_portable"
    rank = 9
    reason = (
        "mma.sync for any strides and on every GPU: chosen for what no kernel before it takes "
        "or speeds up"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        precision: str
        lines: int  # of a block of op(S)
        depth: int
        transposed: bool
        tile: Tile
        values: str  # how far 16-byte copies can run: see access.cuh
        dense: str
        along_lines: bool  # lines lie closer together in the result than columns
        partial: bool = False  # whether sums of parts of the depth are left to parts.cuh

    def takes(self, problem: Spmm, arch: str) -> bool:
        """Whether the kernel computes a problem: all of them."""
        return isinstance(problem, Spmm)

    def choices(self, problem: Spmm, arch: str) -> list[Choice]:
        """The tiles that a problem's columns fill, largest first; there is always one. Then the
        same with several parts of the depth."""
        every = tiles(problem.dtype, problem.precision)
        fitting = [tile.columns for tile in every if tile.columns < 2 * problem.columns]
        fitting = fitting or [every[-1].columns]
        counts = parts.counts(parts.sums_of(problem, False), problem.op.grid_cols)
        split = product((columns for columns in fitting if columns <= PARTS_COLUMNS), counts)
        return [
            *({"columns": columns} for columns in fitting),
            *({"columns": columns, "parts": count} for columns, count in split),
        ]

    def estimate(self, problem: Spmm, choice: Mapping[str, Any], gpu: Gpu) -> float:
        """Microseconds of a problem by a choice."""
        tile, split = _tile(problem, choice), int(choice.get("parts", 1))
        op, itemsize = problem.op, DTYPES[problem.dtype].bytes
        deep = ceil_div(op.grid_cols, split)
        split = ceil_div(op.grid_cols, deep)
        count = _tile_count(problem, tile) * split
        stored = deep * op.filled(max(1, tile.lines // op.rows))
        stored = max(stored, min(1.0, gpu.multiprocessors / count))  # one tile at least has a block
        rate, slower = RATES[mma.is_split(problem.dtype, problem.precision), tile.columns]
        stages = stored * op.cols * itemsize / tile.depth_bytes + FILLING
        stages *= slower if op.cols == 16 else 1.0
        sums = parts.sums_of(problem, False)
        time = START + mma.microseconds(count, stages, rate, gpu.multiprocessors)
        return time + mma.adding_up(sums.elements, split)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Spmm, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launch of a problem, or those of as many parts of the depth as there are, fewer if
        whole blocks come out so. Raises UnsupportedError for sizes that no grid can hold."""
        tile, split = _tile(problem, choice), int(choice.get("parts", 1))
        variant = variant_of(problem, tile)
        count = _tile_count(problem, tile) // problem.batch
        if count * split > mma.MOST_X:
            raise UnsupportedError(
                f"a product of {problem.blocks.heads} heads with {problem.lines} x "
                f"{problem.columns} results is more than one launch holds ({mma.MOST_X} tiles of "
                f"{tile.lines} x {tile.columns}); call it on slices"
            )
        if split == 1:
            return Lowered((self._main(epilogue, problem, variant, gpu.arch),))
        deep = ceil_div(problem.op.grid_cols, split)
        split = ceil_div(problem.op.grid_cols, deep)
        sums = parts.sums_of(problem, variant.along_lines)
        main = self._main((), problem, variant._replace(partial=True), gpu.arch, sums, deep)
        return parts.PARTS.behind(main, epilogue, problem, sums, split, gpu.arch)

    def _main(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Spmm,
        variant: Variant,
        arch: str,
        sums: parts.Sums | None = None,
        part_blocks: int = 0,
    ) -> Step:
        """The launch that leaves a result, or ``sums`` of parts of the depth."""
        values, dense, op, tile = problem.values, problem.dense, problem.op, variant.tile
        ends = (values.row, values.column)[:: -1 if problem.transposed else 1]
        count = _tile_count(problem, tile) // problem.batch
        fixed = _fixed(epilogue).pack(
            values_view=(values.batch, values.slot, *ends),
            dense_view=dense[:4],
            lines=problem.lines,
            columns=problem.columns,
            grid=(op.grid_rows, op.grid_cols, op.row_words, problem.blocks.row_words),
            line_tiles=ceil_div(problem.lines, tile.lines),
            column_tiles=ceil_div(problem.columns, tile.columns),
            tiles=count,
            part_blocks=part_blocks,
            batch=problem.batch,
            values_depth_first=ends[1] <= ends[0],
            dense_depth_first=dense.line <= dense.column,
            **parts.target(problem, stores(problem)[1], sums),
        )
        return Step(
            self.spec(epilogue, variant, arch),
            (count, min(problem.batch, mma.MOST_Y)),
            fixed,
            text.pointers(OPERANDS, epilogue),
            text.scalar_count(epilogue),
        )

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of blocks of one size."""
        flags = (False, True)
        return {
            "dtype": scope.dtypes,
            "precision": ("fp32", "tf32"),
            "lines": dict.fromkeys(scope.block),
            "depth": dict.fromkeys(scope.block),
            "transposed": flags,
            "tile": (*TILES, SPLIT_TILES[0]),
            "values": ("depth", "line", "gather"),
            "dense": ("depth", "line", "gather"),
            "along_lines": flags,
            "partial": flags,
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope) -> bool:
        """Whether these are a layout's blocks, and the tile is one of the numbers'."""
        dtype, precision, lines, depth, transposed, tile, values, *_ = variant
        block = scope.block[::-1] if transposed else scope.block
        return (
            (lines, depth) == block
            and (dtype, precision) in mma.numbers((dtype,), scope.precision)
            and tile in tiles(dtype, precision)
            and values != ("depth" if transposed else "line")
            and not (variant.partial and tile.columns > PARTS_COLUMNS)
        )

    def specs(self, epilogue: tuple[Epilogue, ...], scope, arch: str) -> list[KernelSpec]:
        """With those of the launch behind."""
        behind = parts.PARTS.specs(epilogue, (scope.dtypes, False), arch)
        return [*behind, *super().specs(epilogue, scope, arch)]

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant; parts of sums take no epilogue."""
        epilogue = () if variant.partial else epilogue
        tile, dtype, precision = variant.tile, variant.dtype, variant.precision
        lines, depth, transposed = variant.lines, variant.depth, variant.transposed
        fields = _fixed(epilogue)
        facts = {
            **text.facts(dtype, "float32" if variant.partial else dtype, epilogue),
            "LINES": lines,
            "DEPTH": depth,
            "TRANSPOSED": transposed,
            "TILE_LINES": tile.lines,
            "TILE_COLUMNS": tile.columns,
            "GROUPS": max(1, tile.lines // lines),
            "WARPS": tile.warps,
            "WARP_LINES": tile.warp_lines,
            "WARP_COLUMNS": tile.warp_columns,
            "DEPTH_BYTES": tile.depth_bytes,
            "STAGES": mma.stages(tile.stages, arch),
            "MIN_BLOCKS": tile.blocks,
            "PRODUCTS": 3 if mma.is_split(dtype, precision) else 1,
            "ALONG_LINES": variant.along_lines,
            "PARTIAL": variant.partial,
            "ACCESS_VALUES": Constant(f"Access::{variant.values}"),
            "ACCESS_DENSE": Constant(f"Access::{variant.dense}"),
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), fields.format, epilogue).size,
        }
        source = self.source(
            facts, fields.text(), text.typed_finish(epilogue), includes=mma.INCLUDES
        )
        words = [f"{lines}x{depth}"] + ["transposed"] * transposed
        words += [f"{tile.lines}x{tile.columns}", f"{variant.values}/{variant.dense}"]
        words += ["along_lines"] * variant.along_lines + ["partial"] * variant.partial
        shared = shared_bytes(variant, arch)
        return self.named_spec(source, 32 * tile.warps, shared, dtype, words, epilogue, precision)


PORTABLE = Portable()


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return Fields((*FIXED, *summands.members(epilogue)))


def best_microseconds(problem: Spmm, arch: str, multiprocessors: int) -> float:
    """What the choice of least estimate takes."""
    gpu = Gpu(arch, multiprocessors)
    return min(PORTABLE.estimate(problem, each, gpu) for each in PORTABLE.choices(problem, arch))


def tiles(dtype: str, precision: str) -> tuple[Tile, ...]:
    """Those of a kind of numbers, largest first."""
    return SPLIT_TILES if mma.is_split(dtype, precision) else TILES


def variant_of(problem: Spmm, tile: Tile) -> Portable.Variant:
    """The kernel of a problem, for a tile."""
    return Portable.Variant(
        problem.dtype,
        problem.precision,
        *problem.op[:2],
        problem.transposed,
        tile,
        mma.values_access(problem),
        mma.access(problem.dtype, problem.dense, _batches(problem), None, problem.columns),
        stores(problem)[0],
    )


def shared_bytes(variant: Portable.Variant, arch: str) -> int:
    """The stages of both operands, or the sums that take their place."""
    tile = variant.tile
    waiting = mma.waiting_bytes(tile.warps, tile.warp_lines, tile.warp_columns, variant.along_lines)
    stage = tile.depth_bytes * (tile.lines + tile.columns)
    return max(mma.stages(tile.stages, arch) * stage, waiting)


def stores(problem: Spmm) -> tuple[bool, bool]:
    """Whether lines lie closer together in the result than columns, and whether the closer ones
    take 16-byte stores. Of one column the stride does not count."""
    out = problem.out
    column = out.column if problem.columns > 1 else None
    along_lines = column is None or out.line < column
    near, far = (out.line, column) if along_lines else (column, out.line)
    chunk = CHUNK_BYTES // DTYPES[problem.dtype].bytes
    is_aligned = near == 1 and out.alignment % CHUNK_BYTES == 0 and (far or 0) % chunk == 0
    outer = zip(out[:2], _batches(problem), strict=True)
    is_aligned = is_aligned and not any(stride % chunk for stride, count in outer if count > 1)
    return along_lines, is_aligned and (along_lines or problem.columns % chunk == 0)


def _batches(problem: Spmm) -> tuple[int, int]:
    return problem.batch, problem.blocks.heads


def _tile(problem: Spmm, choice: Mapping[str, Any]) -> Tile:
    every = tiles(problem.dtype, problem.precision)
    return next(tile for tile in every if tile.columns == int(choice["columns"]))


def _tile_count(problem: Spmm, tile: Tile) -> int:
    across = ceil_div(problem.lines, tile.lines) * ceil_div(problem.columns, tile.columns)
    return across * problem.blocks.heads * problem.batch
