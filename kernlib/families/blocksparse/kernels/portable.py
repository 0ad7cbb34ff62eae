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
from kernlib.families.blocksparse.lowering import summands, times
from kernlib.families.blocksparse.lowering.problem import Dense, Spmm
from kernlib.families.blocksparse.lowering.times import Rate
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Constant
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

MOST_X, MOST_Y = 2**31 - 1, 65535  # of a grid
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
INCLUDES = ("common/math.cuh", "blocksparse/access.cuh", summands.HEADER)
CHUNK_BYTES = 16
PASS_LINES = 32  # of sums that a warp stages at a time
LARGE_SHARED = 128 * 1024  # from which on a block has one more stage


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
        counts = parts.counts(parts.sums_of(problem, False), depth_blocks(problem))
        split = product((columns for columns in fitting if columns <= PARTS_COLUMNS), counts)
        return [
            *({"columns": columns} for columns in fitting),
            *({"columns": columns, "parts": count} for columns, count in split),
        ]

    def estimate(self, problem: Spmm, choice: Mapping[str, Any], gpu: Gpu) -> float:
        """Microseconds of a problem by a choice."""
        tile, split = _tile(problem, choice), int(choice.get("parts", 1))
        blocks, itemsize = problem.blocks, DTYPES[problem.dtype].bytes
        lines, depth = (blocks.cols, blocks.rows) if problem.transposed else blocks[:2]
        deep = ceil_div(depth_blocks(problem), split)
        split = ceil_div(depth_blocks(problem), deep)
        count = _tile_count(problem, tile) * split
        stored = deep * times.filled(blocks.density, max(1, tile.lines // lines))
        stored = max(stored, min(1.0, gpu.multiprocessors / count))  # one tile at least has a block
        rate, slower = RATES[is_split(problem.dtype, problem.precision), tile.columns]
        stages = stored * depth * itemsize / tile.depth_bytes + FILLING
        stages *= slower if depth == 16 else 1.0
        sums = parts.sums_of(problem, False)
        time = START + times.stages(count, stages, rate, gpu.multiprocessors)
        return time + times.adding_up(sums.elements, split)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Spmm, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launch of a problem, or those of as many parts of the depth as there are, fewer if
        whole blocks come out so. Raises UnsupportedError for sizes that no grid can hold."""
        tile, split = _tile(problem, choice), int(choice.get("parts", 1))
        variant = variant_of(problem, tile)
        count = _tile_count(problem, tile) // problem.batch
        if count * split > MOST_X:
            raise UnsupportedError(
                f"a product of {problem.blocks.heads} heads with {problem.lines} x "
                f"{problem.columns} results is more than one launch holds ({MOST_X} tiles of "
                f"{tile.lines} x {tile.columns}); call it on slices"
            )
        if split == 1:
            return Lowered((self._main(epilogue, problem, variant, gpu.arch),))
        deep = ceil_div(depth_blocks(problem), split)
        split = ceil_div(depth_blocks(problem), deep)
        sums = parts.sums_of(problem, variant.along_lines)
        main = self._main((), problem, variant._replace(partial=True), gpu.arch, sums, deep)
        main = main._replace(
            grid=(count * split, main.grid[1]), pointers=(*main.pointers[:-1], (WORKSPACE, 0))
        )
        last = parts.PARTS.step(epilogue, problem, sums, split, gpu.arch)
        return Lowered((main, last), 4 * sums.elements * split)

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
        values, dense, blocks, tile = problem.values, problem.dense, problem.blocks, variant.tile
        ends, grid = (values.row, values.column), (blocks.grid_rows, blocks.grid_cols)
        if problem.transposed:
            ends, grid = ends[::-1], grid[::-1]
        words = blocks.col_words if problem.transposed else blocks.row_words
        count = _tile_count(problem, tile) // problem.batch
        view = problem.out[:4] if sums is None else sums.side
        beside = problem.summands if sums is None else ()
        fixed = _fixed(epilogue).pack(
            values_view=(values.batch, values.slot, *ends),
            dense_view=dense[:4],
            out_view=view,
            lines=problem.lines,
            columns=problem.columns,
            grid=(*grid, words, blocks.row_words),
            part_stride=0 if sums is None else sums.elements,
            line_tiles=ceil_div(problem.lines, tile.lines),
            column_tiles=ceil_div(problem.columns, tile.columns),
            tiles=count,
            part_blocks=part_blocks,
            batch=problem.batch,
            values_depth_first=ends[1] <= ends[0],
            dense_depth_first=dense.line <= dense.column,
            whole_stores=stores(problem)[1] if sums is None else True,
            **summands.values(beside),
        )
        return Step(
            self.spec(epilogue, variant, arch),
            (count, min(problem.batch, MOST_Y)),
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
            and (dtype, precision) in numbers((dtype,), scope.precision)
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
            "STAGES": stages(tile, arch),
            "MIN_BLOCKS": tile.blocks,
            "PRODUCTS": 3 if is_split(dtype, precision) else 1,
            "ALONG_LINES": variant.along_lines,
            "PARTIAL": variant.partial,
            "ACCESS_VALUES": Constant(f"Access::{variant.values}"),
            "ACCESS_DENSE": Constant(f"Access::{variant.dense}"),
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), fields.format, epilogue).size,
        }
        source = self.source(facts, fields.text(), text.typed_finish(epilogue), includes=INCLUDES)
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


def numbers(dtypes: tuple[str, ...], precision: str | None) -> list[tuple[str, str]]:
    """Each dtype with its precision, or both of float32's if that is None."""
    of_floats = ("fp32", "tf32") if precision is None else (precision,)
    return [
        (dtype, each)
        for dtype in dtypes
        for each in (of_floats if dtype == "float32" else ("fp32",))
    ]


def tiles(dtype: str, precision: str) -> tuple[Tile, ...]:
    """Those of a kind of numbers, largest first."""
    return SPLIT_TILES if is_split(dtype, precision) else TILES


def variant_of(problem: Spmm, tile: Tile) -> Portable.Variant:
    """The kernel of a problem, for a tile."""
    sizes = problem.blocks.rows, problem.blocks.cols
    return Portable.Variant(
        problem.dtype,
        problem.precision,
        *(sizes[::-1] if problem.transposed else sizes),
        problem.transposed,
        tile,
        values_access(problem),
        access(problem.dtype, problem.dense, _batches(problem), None, problem.columns),
        stores(problem)[0],
    )


def access(
    dtype: str, t: Dense, batches: tuple[int, int], lines: int | None, columns: int | None
) -> str:
    """How far 16-byte copies can run along a dense operand's lines ("depth") or its columns
    ("line"): whole ones, of strides and addresses that are whole ones. ``batches`` are those and
    the heads, ``lines`` and ``columns`` None where they are whole blocks."""
    chunk = CHUNK_BYTES // DTYPES[dtype].bytes
    outer = [stride for stride, count in zip(t[:2], batches, strict=True) if count > 1]
    if t.alignment % CHUNK_BYTES or any(stride % chunk for stride in outer):
        return "gather"
    along = lines is None or lines % chunk == 0
    if t.line == 1 and along and (columns == 1 or t.column % chunk == 0):
        return "depth"
    along = columns is None or columns % chunk == 0
    if t.column == 1 and along and (lines == 1 or t.line % chunk == 0):
        return "line"
    return "gather"


def values_access(problem: Spmm) -> str:
    """Blocks whose rows lie side by side, or nothing."""
    values, chunk = problem.values, CHUNK_BYTES // DTYPES[problem.dtype].bytes
    batch = values.batch if problem.batch > 1 else 0
    apart = batch, values.slot if problem.blocks.capacity > 1 else 0, values.row
    is_aligned = values.alignment % CHUNK_BYTES == 0 and not any(stride % chunk for stride in apart)
    if values.column != 1 or not is_aligned:
        return "gather"
    return "line" if problem.transposed else "depth"


def stages(tile: Tile, arch: str) -> int:
    """Stages under way: one more where a multiprocessor has shared memory for it."""
    return tile.stages + (targets.SHARED_BYTES[arch] >= LARGE_SHARED)


def shared_bytes(variant: Portable.Variant, arch: str) -> int:
    """The stages of both operands, or the sums that take their place."""
    tile = variant.tile
    waiting = waiting_bytes(tile.warps, tile.warp_lines, tile.warp_columns, variant.along_lines)
    return max(stages(tile, arch) * tile.depth_bytes * (tile.lines + tile.columns), waiting)


def waiting_bytes(warps: int, lines: int, columns: int, along_lines: bool) -> int:
    """Sums on their way to the result: see store.cuh."""
    lines = min(lines, PASS_LINES)
    return 4 * warps * (columns * (lines + 4) if along_lines else lines * (columns + 8))


def depth_blocks(problem: Spmm) -> int:
    """Blocks along the depth, stored or not."""
    return problem.blocks.grid_rows if problem.transposed else problem.blocks.grid_cols


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


def is_split(dtype: str, precision: str) -> bool:
    """Whether numbers are words of TF32 and what is left of them."""
    return dtype == "float32" and precision == "fp32"


def _tile(problem: Spmm, choice: Mapping[str, Any]) -> Tile:
    every = tiles(problem.dtype, problem.precision)
    return next(tile for tile in every if tile.columns == int(choice["columns"]))


def _tile_count(problem: Spmm, tile: Tile) -> int:
    across = ceil_div(problem.lines, tile.lines) * ceil_div(problem.columns, tile.columns)
    return across * problem.blocks.heads * problem.batch
