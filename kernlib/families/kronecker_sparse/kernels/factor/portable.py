"""Products of any strides, on every GPU.

Tiles of out by mma.sync. Weights whose depth does not lie side by side are packed first where many
tiles read them. A long depth with few tiles is split, and a last launch adds up the splits, so that
the result does not depend on the order in which CTAs run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.lowering import hopper_common, times
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    OutLayout,
    Problem,
    Scope,
    depth_first,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Constant
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered, Step

THREADS = 256
STAGES = 4
MIN_BLOCKS = 2  # that share a multiprocessor
LINE_BYTES = 64  # of depth of a line, in a stage
PLACE_BYTES = 128  # of static shared memory: what a block computes
PART = 1024  # terms of one chain of 3xTF32 sums
MIN_SPLIT = 512  # terms; shorter splits wait more than they sum
WAVES = 4  # of blocks that splitting may make at most
MAX_SLABS = 65535  # of a grid's second axis
ACCESSES = ("depth", "line", "gather")
PACK_ROWS = 1024  # from which on a packed right operand is worth a launch
OPERANDS = ("left", "right", "out")
FIXED = Fields((
    "FactorStrides left_strides", "FactorStrides right_strides",
    "i64 out_block_stride", "i64 out_lane_stride", "i64 out_row_stride", "i64 out_column_stride",
    "i64 out_split_stride",
    "i64 rows", "i64 columns", "i64 depth", "i64 split_depth",
    "u32 lanes", "u32 column_tiles", "u32 row_tiles",
    "u32 columns_of_tiles",  # column_tiles * lanes * blocks
    "u32 rows_of_tiles",  # row_tiles * splits
    "u32 rows_a_slab",  # of tiles, in one blockIdx.y
    "u32 left_depth_first", "u32 right_depth_first",
    "u32 out_along_rows",  # whether rows lie closer together in out than columns
    "u32 out_vectors",  # whether out takes aligned 16-byte stores along its closer lines
))  # fmt: skip


class Tile(NamedTuple):
    """Rows and columns of a block."""

    rows: int
    columns: int


# Largest first. The big one is for those who have the registers: 3xTF32 keeps two sums for each of
# its outputs, a gather what it has read.
BIG, TALL, SMALL = TILES = Tile(128, 128), Tile(128, 64), Tile(64, 64)


class Rates(NamedTuple):
    """Microseconds of launches and of a round of tiles, and of a million numbers or bytes where
    nothing else is said."""

    launch: float
    pack: float
    tile: float
    multiplication: float
    gather: float  # of a thousand numbers of one tile that are read one by one
    written: float  # bytes of sectors
    read: float  # the same
    far: float  # numbers read, where neighbours read a line each
    weight: float  # numbers of the weight beside that, which many tiles read at once


# By the bytes of a number; :mod:`..lowering.times` says of what they were fitted to.
RATES = {
    2: Rates(2.21, 3.61, 0.781, 2.24, 0.157, 0.276, 0.035, 4.97, 3.29),
    4: Rates(2.06, 3.39, 1.07, 2.51, 0.08, 0.271, 0.046, 3.44, 2.91),
}
LINE = 128  # bytes of a line of the caches
WORD = 4  # bytes of depth that a thread reads, whose neighbour reads the next ones


class Portable(Kernel):
    """Takes every problem."""

    role = "factor"
    name = "portable"
    header = "kronecker_sparse/portable/portable.cuh"
    entry = "kronecker_sparse_portable"
    rank = 7
    reason = (
        "mma.sync for any strides and on every GPU: chosen for few rows, where strides or sizes "
        "are no whole 16 bytes, where it is estimated to be fastest (batch first, d > 1), and "
        "on all GPUs but sm_90a"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        precision: str
        tile: Tile
        left: str
        right: str
        partial: bool  # sums into the workspace, as fp32 from half types

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem: any."""
        return True

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The tiles that a problem fills, largest first; there is always one."""
        sides = accesses(packed(problem))
        tiles = _tiles(problem.dtype, problem.precision, arch, problem.rows, problem.columns, sides)
        return [{"rows": tile.rows, "columns": tile.columns} for tile in tiles]

    def default(self, problem: Problem, gpu: Gpu) -> Choice:
        """The fastest tile, where there is an estimate and no split; else the largest that pads the
        columns no more than the next one does, and a small one where the tiles are too few for the
        device."""
        every, splits = self.choices(problem, gpu.arch), problem.depth >= 2 * MIN_SPLIT
        if times.knows(problem) and not splits:
            return min(every, key=lambda tile: microseconds(problem, tile, gpu.multiprocessors))
        chosen = every[0]
        for choice in every[1:]:
            if _padded(problem.columns, choice) < _padded(problem.columns, chosen):
                chosen = choice
        tiles = tile_count(problem, chosen["rows"], chosen["columns"])
        return every[-1] if tiles < gpu.multiprocessors and not splits else chosen

    def estimate(self, problem: Problem, choice: Mapping[str, int], gpu: Gpu) -> float:
        """Microseconds of the fastest tile where there is an estimate, else by rule."""
        if not times.knows(problem) or dict(choice) != self.default(problem, gpu):
            return super().estimate(problem, choice, gpu)
        return min(microseconds(problem, tile) for tile in self.choices(problem, gpu.arch))

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem. Raises UnsupportedError for sizes that no grid can hold."""
        tile, original, problem = _tile(choice), problem, packed(problem)
        count = splits(epilogue, problem, tile, gpu.multiprocessors)
        partial = count > 1 and problem.dtype != "float32"
        variant = self.Variant(problem.dtype, problem.precision, tile, *accesses(problem), partial)
        spec = self.spec(() if count > 1 else epilogue, variant, gpu.arch)
        if count > 1:
            from kernlib.families.kronecker_sparse.kernels.steps import split_k_sum

            layout, one = split_k_sum.layout(problem)
            grid, fixed = _launch(problem, tile, layout, one, count)
            main = Step(spec, grid, fixed, (("left", 0), ("right", 0), ("workspace", 0)))
            return Lowered(
                (main, split_k_sum.SplitKSum().step(problem, layout, one, count)), 4 * one * count
            )
        grid, fixed = _launch(problem, tile, problem.out, 0, 1)
        packs = problem != original
        operands = ("left", "workspace" if packs else "right", "out")
        pointers = text.pointers(operands, epilogue)
        main = Step(spec, grid, fixed, pointers, text.scalar_count(epilogue))
        if not packs:
            return Lowered((main,))
        from kernlib.families.kronecker_sparse.kernels.steps.portable_pack import PortablePack

        packing = PortablePack().step(original, problem.right)
        return Lowered((packing, main), 16 * _chunks(problem))

    def launch_untuned(self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu) -> Lowered:
        """The launches of a problem with the tile that is taken untuned."""
        return self.launch(epilogue, problem, gpu, self.default(problem, gpu))

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of any strides."""
        return {
            "dtype": scope.dtypes,
            "precision": scope.precisions,
            "tile": TILES,
            "left": ACCESSES,
            "right": ACCESSES,
            "partial": (False, True),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether a product of the scope, forward or backward, fills the tile; splits have no
        epilogue."""
        dtype, precision, tile, left, right, partial = variant
        if (dtype, precision) not in scope.numbers or (
            partial and (epilogue or dtype == "float32")
        ):
            return False
        columns = max(scope.sizes[:2])
        return tile in _tiles(dtype, precision, scope.arch, PART, columns, (left, right))

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants, and of what packs and what sums."""
        from kernlib.families.kronecker_sparse.kernels.steps.portable_pack import PortablePack
        from kernlib.families.kronecker_sparse.kernels.steps.split_k_sum import SplitKSum

        steps = [
            step.spec((), step.Variant(dtype))
            for dtype in scope.dtypes
            for step in (PortablePack(), SplitKSum())
        ]
        return super().specs(epilogue, scope, arch) + steps

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant. Raises UnsupportedError where its shared memory does not
        fit."""
        dtype, precision, tile, left, right, partial = variant
        words = [f"{tile.rows}x{tile.columns}", f"{left}/{right}", *["partial"] * partial]
        facts = {
            **text.facts(dtype, "float32" if partial else dtype, epilogue),
            "TILE_ROWS": tile.rows,
            "TILE_COLUMNS": tile.columns,
            "STAGES": STAGES,
            "MIN_BLOCKS": MIN_BLOCKS,
            "PRODUCTS": hopper_common.products(dtype, precision),
            "ACCESS_LEFT": Constant(f"Access::{left}"),
            "ACCESS_RIGHT": Constant(f"Access::{right}"),
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), FIXED.format, epilogue).size,
        }
        needed = (
            "common/math.cuh",
            "kronecker_sparse/portable/access.cuh",
            "kronecker_sparse/strides.cuh",
        )
        source = self.source(facts, FIXED.text(), text.typed_finish(epilogue), includes=needed)
        shared = shared_bytes(dtype, tile, left, right)
        spec = self.named_spec(source, THREADS, shared, dtype, words, epilogue, precision)
        if shared > _limit(arch):
            raise UnsupportedError(
                f"{spec.description} needs {shared} bytes of shared memory, a block of {arch} has "
                f"{_limit(arch)}"
            )
        return spec


def microseconds(
    problem: Problem, choice: Mapping[str, object], multiprocessors: int = times.MULTIPROCESSORS
) -> float:
    """What a problem that :func:`times.knows` takes by tiles of a choice."""
    rows, columns = int(choice["rows"]), int(choice["columns"])
    item, rates = DTYPES[problem.dtype].bytes, RATES[DTYPES[problem.dtype].bytes]
    x, y, weight = times.numbers(problem)
    read = packed(problem)
    left, right = (access == "gather" for access in accesses(read))
    row_tiles, column_tiles = ceil_div(problem.rows, rows), ceil_div(problem.columns, columns)
    tiles, depth, gathered = tile_work(read, rows, columns)
    multiplications = (
        rows * columns * hopper_common.products(problem.dtype, problem.precision) / 1e6
    )
    of_tile = rates.tile + depth * (rates.multiplication * multiplications)
    of_tile += depth * rates.gather * gathered / 1e3
    x_reads, weight_reads = x * column_tiles * left, weight * row_tiles * right
    near = min(problem.lanes * item, times.SECTOR)
    sectors = near * (rates.written * y + rates.read * (x_reads + weight_reads))
    far = _apart(problem) * (rates.far * (x_reads + weight_reads) + rates.weight * weight_reads)
    launches = rates.launch + rates.pack * (read != problem)
    slots = multiprocessors * MIN_BLOCKS
    return launches + times.rounds(tiles, slots) * of_tile + (sectors + far) / 1e6


def tile_work(problem: Problem, rows: int, columns: int) -> tuple[int, int, int]:
    """How many tiles there are of a size, their depth in whole lines, and the numbers of a term
    that one reads one by one."""
    left, right = (access == "gather" for access in accesses(problem))
    depth = round_up(problem.depth, LINE_BYTES // DTYPES[problem.dtype].bytes)
    gathered = min(problem.rows, rows) * left + min(problem.columns, columns) * right
    return tile_count(problem, rows, columns), depth, gathered


def _apart(problem: Problem) -> float:
    """How far threads that read neighbouring words of depth are from reading a line each, d words
    apart: 0 where they share sectors, 1 from d = 32 on."""
    sector = times.SECTOR
    return min(1.0, max(0.0, (WORD * problem.lanes - sector) / (LINE - sector)))


def packed(problem: Problem) -> Problem:
    """The problem after its right operand is packed; itself where that is not done: where 16-byte
    copies can read the operand as it is, and where few tiles read it."""
    right, few = problem.right, problem.rows < max(PACK_ROWS, problem.depth)
    if few or access(problem, right, problem.columns) != "gather":
        return problem
    chunk = 16 // DTYPES[problem.dtype].bytes
    pitch = round_up(problem.depth, chunk)
    lane = problem.columns * pitch
    packed_problem = problem._replace(right=Layout(problem.lanes * lane, lane, pitch, 1, 16, True))
    return packed_problem if _chunks(packed_problem) <= MAX_BLOCKS else problem


def _chunks(problem: Problem) -> int:
    """The chunks of a packed right operand."""
    chunk = 16 // DTYPES[problem.dtype].bytes
    return problem.blocks * problem.lanes * problem.columns * (problem.right.line // chunk)


def splits(epilogue: tuple, problem: Problem, tile: Tile, multiprocessors: int) -> int:
    """Splits of the depth: as few as fill nine tenths of the device's last wave, of no fewer than
    MIN_SPLIT terms each; 1 with an epilogue, which needs the whole sum."""
    most = problem.depth // MIN_SPLIT
    if most < 2 or epilogue:
        return 1
    slots = multiprocessors * MIN_BLOCKS
    tiles = tile_count(problem, tile.rows, tile.columns)
    best, filled = 1, 0.0
    for count in range(1, min(most, max(1, WAVES * slots // tiles)) + 1):
        waves = ceil_div(tiles * count, slots)
        share = tiles * count / (waves * slots)
        if share > filled + 0.01:
            best, filled = count, share
        if filled >= 0.9:
            break
    # Rounding each up to whole stages may leave the last ones nothing.
    return ceil_div(problem.depth, _split_depth(problem, best))


def _split_depth(problem: Problem, count: int) -> int:
    stage = LINE_BYTES // DTYPES[problem.dtype].bytes
    return ceil_div(ceil_div(problem.depth, count), stage) * stage


def _tiles(
    dtype: str, precision: str, arch: str, rows: int, columns: int, sides: tuple[str, str]
) -> list[Tile]:
    """Tiles that fit a block of ``arch`` and its registers, and that a result fills; the small one
    in any case."""
    crowded = (dtype, precision) == ("float32", "fp32") or sides == ("gather", "gather")
    tiles = (TALL, SMALL) if crowded else (BIG, TALL, SMALL)
    fitting = [t for t in tiles if shared_bytes(dtype, t, *sides) <= _limit(arch)]
    wide = [t for t in fitting if t.columns < 2 * max(columns, SMALL.columns)]
    return [t for t in wide if t.rows < 2 * max(rows, SMALL.rows)] or [SMALL]


def _limit(arch: str) -> int:
    return targets.SHARED_BYTES[arch] - PLACE_BYTES


def _tile(choice: Choice) -> Tile:
    size = int(choice["rows"]), int(choice["columns"])
    return next(tile for tile in TILES if (tile.rows, tile.columns) == size)


def _padded(count: int, choice: Choice) -> int:
    return ceil_div(count, choice["columns"]) * choice["columns"]


def tile_count(problem: Problem, rows: int, columns: int) -> int:
    """Tiles of so many rows and columns, of all blocks and lanes."""
    tiles = ceil_div(problem.rows, rows) * ceil_div(problem.columns, columns)
    return tiles * problem.blocks * problem.lanes


def accesses(problem: Problem) -> tuple[str, str]:
    """Those of both operands."""
    left = access(problem, problem.left, problem.rows)
    return left, access(problem, problem.right, problem.columns)


def access(problem: Problem, layout: Layout, lines: int) -> str:
    """How far 16-byte copies can run: see Access in portable/operand.cuh. The stride of what there
    is one of does not count. A copy of fewer than 16 bytes reads all of them, so lines end on whole
    ones, or go on in zeros."""
    chunk = 16 // DTYPES[problem.dtype].bytes
    block = layout.block if problem.blocks > 1 else 0
    lane = layout.lane if problem.lanes > 1 else 0
    if layout.alignment % 16 or block % chunk or lane % chunk:
        return "gather"
    side_by_side, apart = layout.depth == 1, layout.line % chunk == 0 or lines == 1
    if side_by_side and apart and (layout.padded or problem.depth % chunk == 0):
        return "depth"
    side_by_side, apart = layout.line == 1, layout.depth % chunk == 0 or problem.depth == 1
    if side_by_side and apart and lines % chunk == 0:
        return "line"
    return "gather"


def shared_bytes(dtype: str, tile: Tile, left: str, right: str) -> int:
    """The stages of both operands, or the tile of sums that takes their place."""
    stage = _stage_bytes(dtype, tile.rows, left) + _stage_bytes(dtype, tile.columns, right)
    sums = 4 * max(tile.rows * (tile.columns + 8), tile.columns * (tile.rows + 4))
    return max(STAGES * stage, sums)


def _stage_bytes(dtype: str, lines: int, access: str) -> int:
    itemsize = DTYPES[dtype].bytes
    if access != "line":
        return lines * LINE_BYTES
    return LINE_BYTES // itemsize * (lines * itemsize + (16 if itemsize == 2 else 32))


def _launch(
    problem: Problem, tile: Tile, out: OutLayout, split_stride: int, count: int
) -> tuple[tuple[int, int], bytes]:
    """Grid and struct Fixed of the main kernel, with ``count`` splits ``split_stride`` apart."""
    column_tiles, row_tiles = (
        ceil_div(problem.columns, tile.columns),
        ceil_div(problem.rows, tile.rows),
    )
    across, down = column_tiles * problem.lanes * problem.blocks, row_tiles * count
    slab = min(down, max(1, MAX_BLOCKS // across))
    slabs = ceil_div(down, slab)
    if across > MAX_BLOCKS or slabs > MAX_SLABS or problem.depth >= 2**31 - 2 * PART:
        raise UnsupportedError(
            f"{problem.blocks} x {problem.lanes} products of {problem.rows} x {problem.columns} "
            f"results over {problem.depth} terms are more than one launch holds ({MAX_BLOCKS} "
            f"tiles of {tile.rows} x {tile.columns}); call it on slices"
        )
    along_rows, vectors = _stores(problem, out, 4 if split_stride else DTYPES[problem.dtype].bytes)
    fixed = FIXED.pack(
        left_strides=problem.left[:4],
        right_strides=problem.right[:4],
        **out.strides,
        out_split_stride=split_stride,
        rows=problem.rows,
        columns=problem.columns,
        depth=problem.depth,
        split_depth=_split_depth(problem, count),
        lanes=problem.lanes,
        column_tiles=column_tiles,
        row_tiles=row_tiles,
        columns_of_tiles=across,
        rows_of_tiles=down,
        rows_a_slab=slab,
        left_depth_first=depth_first(problem, problem.left, problem.rows),
        right_depth_first=depth_first(problem, problem.right, problem.columns),
        out_along_rows=along_rows,
        out_vectors=vectors,
    )
    return (slab * across, slabs), fixed


def _stores(problem: Problem, out: OutLayout, itemsize: int) -> tuple[int, int]:
    """Whether rows lie closer together than columns, and whether the closer ones take 16-byte
    stores. Of what there is one of the stride does not count."""
    chunk = 16 // itemsize
    row = out.row if problem.rows > 1 else None
    column = out.column if problem.columns > 1 else None
    along_rows = row is not None and (column is None or row < column)
    near, far = (row, column) if along_rows else (column, row)
    others = (far, out.block if problem.blocks > 1 else 0, out.lane if problem.lanes > 1 else 0)
    is_aligned = near == 1 and not any((stride or 0) % chunk for stride in others)
    return int(along_rows), int(is_aligned and out.alignment % 16 == 0)
