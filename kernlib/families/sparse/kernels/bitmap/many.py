"""The product of a bitmap matrix with many vectors: pack.cuh, bitmap/many.cuh or bitmap/pairs.cuh,
and sum.cuh behind them where tiles are cut along the columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels import pack
from kernlib.families.sparse.kernels.base import SparseKernel
from kernlib.families.sparse.kernels.pack import Pack
from kernlib.families.sparse.kernels.sum import Sum
from kernlib.families.sparse.lowering.problem import Problem, Scope
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

FORMAT, ARCHS = "bitmap", ("sm_90a",)
# Fewer vectors take bitmap.cuh. Of more a product by cuBLAS with the matrix laid out densely is
# faster: 303 us for 2048 vectors and 12288 x 4096 at density 0.5, beside 358 here, on an H200 where
# 512 vectors take 92 here and 110 so.
LEAST_COLUMNS, MOST_COLUMNS = 9, 1024
CHUNK_ROWS, CHUNK_COLUMNS = 16, 256
WORD_BYTES = 512  # of a chunk's bitmap
SLOT_TAIL = 16  # bytes behind a chunk: up to 12 are read for nothing, 8 are a barrier
FEW_WARPS = 1.1  # times as long as with 16 warps a chunk takes, as they wait for its values
MAX_SLOTS, RING_OFFSET = 8, 128
MOST_SIZE = 2**31 - 1 - CHUNK_COLUMNS  # most rows and columns: they are counted by 32 bits


class Tile(NamedTuple):
    """A CTA's: 64 rows for each of ``warpgroups``, ``columns`` vectors, ``stages`` of x, and
    whether two CTAs of a cluster compute the ``pairs`` of parts of a tile that is cut."""

    warpgroups: int
    columns: int
    stages: int
    pairs: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def warps(self) -> int:
        return 4 * self.warpgroups

    @property
    def threads(self) -> int:
        """With the warp, or for wide tiles the warpgroup, that brings x."""
        return 32 * (self.warps + (4 if self.columns > 128 else 1))

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides the rings of chunks."""
        x = self.stages * self.columns * 128
        return round_up(x + self.warps * WORD_BYTES + 16 * self.stages, 1024) + RING_OFFSET


NARROW = tuple(
    Tile(warpgroups, columns, stages)
    for warpgroups, most in ((4, 6), (3, 4))
    for columns, stages in ((16, 8), (32, 6), (64, most))
)
WIDE = Tile(2, 128, 4, True), Tile(2, 256, 3, True)
TILES = (*NARROW, *WIDE)


class Cut(NamedTuple):
    """How tiles are shared out: ``uncut`` ones, and behind them those cut into ``parts``; and its
    ``cost``, in chunks that a CTA goes through one after the other."""

    uncut: int
    parts: int
    cost: float


class BitmapMany(SparseKernel):
    """Multiplies by tiles of up to 64 vectors, of matrices whose values have all of their bits."""

    role = "product"
    name = "bitmap many"
    header = "sparse/bitmap/many.cuh"
    entry = "sparse_bitmap_many"
    reason = "the same format, 9 to 1024 vectors, by wgmma of sm_90a"
    operands = ("data", "offsets", "x", "out", "sums")  # x and sums lie in the workspace
    fixed = Fields((
        "i64 rows", "i64 out_vector_stride", "i64 out_row_stride",
        "i64 cut_rows",       # rows of the tiles that are cut
        "i64 first_cut_row",
        "int columns", "int kchunks", "int slabs",
        "int depth_blocks",   # of 64 columns, of x
        "int padded",         # vectors of x, with those that fill up tiles
        "int row_tiles", "int n_tiles",
        "int whole_tiles",    # those in front of the ones that are cut
        "int parts",          # of a tile that is cut
        "int part_chunks", "int longer_parts",  # the first ones have one chunk more
        "int slots", "int slot_bytes",          # of a warp's ring
        "int unused",
    ))  # fmt: skip
    steps = (Pack,)
    tiles: ClassVar[tuple[Tile, ...]] = NARROW

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        tile: Tile

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        if arch not in ARCHS or problem.format != FORMAT:
            return False
        if problem.dtype not in ("float16", "bfloat16"):
            return False
        if not LEAST_COLUMNS <= problem.columns <= MOST_COLUMNS:
            return False
        if 0 in (problem.rows, problem.cols) or max(problem.rows, problem.cols) > MOST_SIZE:
            return False
        return tile_of(problem, arch) in self.tiles

    def launch(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        gpu: Gpu,
        choice: Mapping[str, Any],
    ) -> Lowered:
        """The launches of a problem."""
        tile, arch = tile_of(problem, *gpu), gpu.arch
        row_tiles, n_tiles, kchunks = _grid(tile, problem)
        padded, cut = n_tiles * tile.columns, cut_of(tile, problem, gpu.multiprocessors)
        first_cut_row = min(problem.rows, cut.uncut // n_tiles * tile.rows)
        cut_rows = problem.rows - first_cut_row
        x_bytes = round_up(pack.nbytes(problem, padded), 1024)
        part_chunks, longer = divmod(kchunks, cut.parts)
        ctas = cut.uncut + (row_tiles * n_tiles - cut.uncut) * cut.parts
        main = self.step_of(
            epilogue,
            problem,
            self.Variant(problem.dtype, tile),
            arch,
            (round_up(ctas, 2) if tile.pairs else ctas, 1),
            cut_rows=cut_rows,
            first_cut_row=first_cut_row,
            kchunks=kchunks,
            slabs=ceil_div(problem.rows, CHUNK_ROWS),
            depth_blocks=pack.blocks(problem),
            padded=padded,
            row_tiles=row_tiles,
            n_tiles=n_tiles,
            whole_tiles=cut.uncut,
            parts=cut.parts,
            part_chunks=part_chunks,
            longer_parts=longer,
            slots=_slots(problem, tile, arch),
            slot_bytes=slot_of(problem),
        ).placed({"x": (WORKSPACE, 0), "sums": (WORKSPACE, x_bytes)})
        packed = Pack().step(problem, arch, padded, pack.FRAGMENTS)
        steps = [packed._replace(overlaps=problem.frozen), main]
        if cut.parts == 1 or tile.pairs:
            return Lowered(tuple(steps), x_bytes)
        steps.append(_sum(epilogue, problem, arch, cut.parts, x_bytes, first_cut_row))
        return Lowered(tuple(steps), x_bytes + 4 * cut.parts * problem.columns * cut_rows)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """In half types."""
        is_legal = scope.arch in ARCHS and scope.format == FORMAT
        return {"dtype": scope.halves.dtypes if is_legal else (), "tile": self.tiles}

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a tile."""
        dtype, tile = variant
        facts = {
            **text.facts(dtype, dtype, epilogue),
            "WARPGROUPS": tile.warpgroups,
            "COLUMNS": tile.columns,
            "X_STAGES": tile.stages,
            "PAIRS": tile.pairs,
        }
        words = [f"rows={tile.rows}", f"vectors={tile.columns}"]
        shared, product = targets.SHARED_BYTES[arch], multiply(dtype, tile.columns, True)
        return self.spec_of(epilogue, facts, tile.threads, shared, dtype, words, product)


class BitmapPairs(BitmapMany):
    """Multiplies by wider tiles, whose parts two CTAs of a cluster compute."""

    name = "bitmap pairs"
    header = "sparse/bitmap/pairs.cuh"
    reason = (
        "9 vectors or more of the same format, by two blocks of threads that share what they read"
    )
    tiles = WIDE


def tile_of(problem: Problem, arch: str, multiprocessors: int = 132) -> Tile | None:
    """The tile for a problem, of those whose rings have two slots a warp: one that takes all
    vectors at a time if there is one, and of these the one that should be done first. None if no
    ring fits."""
    fitting = [tile for tile in TILES if _slots(problem, tile, arch) >= 2]
    if not fitting:
        return None
    widest = max(tile.columns for tile in fitting)
    columns = min((t.columns for t in fitting if t.columns >= problem.columns), default=widest)

    def cost(tile: Tile) -> float:
        few = FEW_WARPS if tile.warps < 16 and tile.columns <= 64 else 1.0
        return cut_of(tile, problem, multiprocessors).cost * tile.rows * few

    return min((tile for tile in fitting if tile.columns == columns), key=cost)


def _slots(problem: Problem, tile: Tile, arch: str) -> int:
    ring = targets.SHARED_BYTES[arch] - tile.fixed_bytes
    return min(MAX_SLOTS, ring // (tile.warps * slot_of(problem)))


def slot_of(problem: Problem) -> int:
    """Bytes of the ring's places: the largest chunk and SLOT_TAIL."""
    return round_up(problem.fact("largest") + SLOT_TAIL, 128)


def _sum(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    parts: int,
    begin: int,
    first_row: int,
) -> Step:
    """The launch that adds up the rows of tiles that are cut."""
    item = DTYPES[problem.dtype].bytes
    rest = problem._replace(rows=problem.rows - first_row)
    step = Sum().step(epilogue, rest, arch, parts, begin)
    begins = {"workspace": 0, "out": first_row * problem.out_strides[1] * item}
    pointers = tuple((name, at + begins.get(name, first_row * item)) for name, at in step.pointers)
    return step._replace(pointers=pointers)


def _grid(tile: Tile, problem: Problem) -> tuple[int, int, int]:
    """Tiles along the rows and along the vectors, and chunks along the columns."""
    tiles = ceil_div(problem.rows, tile.rows), ceil_div(problem.columns, tile.columns)
    return *tiles, ceil_div(problem.cols, CHUNK_COLUMNS)


def cut_of(tile: Tile, problem: Problem, multiprocessors: int) -> Cut:
    """Whole rounds of tiles, and the rest cut so that it takes least; a chunk more for each
    beginning, and some for the sums."""
    row_tiles, n_tiles, kchunks = _grid(tile, problem)
    tiles, step = row_tiles * n_tiles, 2 if tile.pairs else n_tiles
    rounds = tiles // multiprocessors
    uncut = rounds * multiprocessors // step * step

    def cost(first: int, parts: int) -> float:
        times = ceil_div(first, multiprocessors) * (kchunks + 1)
        times += ceil_div((tiles - first) * parts, multiprocessors) * (ceil_div(kchunks, parts) + 1)
        return times + (1 + 0.02 * parts if parts > 1 else 0)

    most = min(kchunks, 2 if tile.pairs else 16)
    cuts = [Cut(tiles, 1, cost(tiles, 1))]
    cuts += [Cut(uncut, parts, cost(uncut, parts)) for parts in range(2, most + 1)]
    return min(cuts, key=lambda cut: (cut.cost, cut.parts))
