"""The kernels portable*.cuh and split_k_sum.cuh of kernel_sources/kronecker_sparse: for any
strides.

Tiles of out by mma.sync. Weights whose depth does not lie side by side are packed first where many
tiles read them. A long depth with few tiles is split, and a last launch adds up the splits, so that
the result does not depend on the order in which blocks run.
"""

from __future__ import annotations

import struct
from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.lowering.problem import (
    MAX_BLOCKS,
    Layout,
    OutLayout,
    Problem,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step

KIND = "portable"
THREADS = 256
LINE_BYTES = 64  # of depth of a line, in a stage
PLACE_BYTES = 128  # of static shared memory: what a block computes
PART = 1024  # terms of one chain of 3xTF32 sums
REDUCE_RUN = 4  # columns of a thread that adds up splits
SUM_BYTES = 4 * REDUCE_RUN * THREADS  # of static shared memory: the sums of all threads
MOST_GROUPS = 8  # of threads that share the splits of a run
SPLITS_EACH = 4  # that a thread adds up at least, where several share those of a run
MIN_SPLIT = 512  # terms; shorter splits wait more than they sum
WAVES = 4  # of blocks that splitting may make at most
MAX_SLABS = 65535  # of a grid's second axis
ACCESSES = ("depth", "line", "gather")
FIXED = "<17q10I"  # struct Fixed
PACK_PARAMETERS = Parameters(2, "<5q6I")
SUM_PARAMETERS = {False: Parameters(2, "<5q8I"), True: Parameters(3, "<5q8I")}  # with a bias
PACK_ROWS = 1024  # from which on a packed right operand is worth a launch


class Tile(NamedTuple):
    """Rows and columns of a block, its stages, and the blocks that share a multiprocessor."""

    rows: int
    columns: int
    stages: int
    blocks: int


# Largest first. The big one is for those who have the registers: 3xTF32 keeps two sums for each of
# its outputs, a gather what it has read.
BIG, TALL, SMALL = Tile(128, 128, 4, 2), Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    tile: Tile
    left: str
    right: str
    partial: bool  # sums into the workspace, as fp32 from half types


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """The tiles that a problem fills, largest first; there is always one."""
    sides = accesses(packed(problem))
    tiles = _tiles(problem.dtype, problem.precision, arch, problem.rows, problem.columns, sides)
    return [{"rows": tile.rows, "columns": tile.columns} for tile in tiles]


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: the largest that pads the columns no more than the
    next one does, and a small one where the tiles are too few for the device."""
    chosen = known[0]
    for choice in known[1:]:
        if _padded(problem.columns, choice) < _padded(problem.columns, chosen):
            chosen = choice
    tiles = tile_count(problem, chosen["rows"], chosen["columns"])
    if tiles < multiprocessors and problem.depth < 2 * MIN_SPLIT:
        return known[-1]
    return chosen


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call with the tile of ``choice``, one of :func:`candidates`. Raises
    UnsupportedError for sizes that no grid can hold."""
    tile, given, problem = _tile(choice), problem, packed(problem)
    packs = problem != given
    count = splits(epilogue, problem, tile, multiprocessors)
    variant = _variant(problem, tile, count > 1)
    made = spec(() if count > 1 else epilogue, variant, arch)
    if count > 1:
        partial, one = partial_layout(problem)
        grid, fixed = _launch(problem, tile, partial, one, count)
        main = Step(made, grid, fixed, (("left", 0), ("right", 0), ("workspace", 0)))
        return Lowered((main, reduce_step(problem, partial, one, count)), 4 * one * count)
    grid, fixed = _launch(problem, tile, problem.out, 0, 1)
    operands = (("left", 0), ("workspace" if packs else "right", 0), ("out", 0))
    pointers = (*operands, *text.vector_pointers(epilogue))
    main = Step(made, grid, fixed, pointers, text.scalar_count(epilogue))
    if not packs:
        return Lowered((main,))
    return Lowered((_pack(given, problem.right), main), 16 * _chunks(problem))


def lower_untuned(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a call with the tile that is taken untuned."""
    choice = default(problem, candidates(problem, arch), multiprocessors)
    return lower(epilogue, problem, arch, multiprocessors, choice)


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for products of b x c blocks (b, c and d are
    ``sizes``), forward and backward, and ``kinds`` of numbers: (dtype, precision)."""
    found = []
    for dtype, precision in kinds:
        for sides in product(ACCESSES, ACCESSES):
            for tile in _tiles(dtype, precision, arch, PART, max(sizes[:2]), sides):
                variant = Variant(dtype, precision, tile, *sides, False)
                found += [spec(epilogue, variant, arch) for epilogue in epilogues]
                found.append(spec((), variant._replace(partial=dtype != "float32"), arch))
        found += [pack_spec(dtype), reduce_spec(dtype)]
    return list(dict.fromkeys(found))


def packed(problem: Problem) -> Problem:
    """The problem after its right operand is packed; itself where that is not done: where 16-byte
    copies can read the operand as it is, and where few tiles read it."""
    right, few = problem.right, problem.rows < max(PACK_ROWS, problem.depth)
    if few or access(problem, right, problem.columns) != "gather":
        return problem
    chunk = 16 // DTYPES[problem.dtype].bytes
    pitch = round_up(problem.depth, chunk)
    lane = problem.columns * pitch
    made = problem._replace(right=Layout(problem.lanes * lane, lane, pitch, 1, 16, True))
    return made if _chunks(made) <= MAX_BLOCKS else problem


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
    slots = multiprocessors * tile.blocks
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
    known = (TALL, SMALL) if crowded else (BIG, TALL, SMALL)
    fitting = [t for t in known if shared_bytes(dtype, t, *sides) <= _limit(arch)]
    wide = [t for t in fitting if t.columns < 2 * max(columns, SMALL.columns)]
    return [t for t in wide if t.rows < 2 * max(rows, SMALL.rows)] or [SMALL]


def _limit(arch: str) -> int:
    return targets.SHARED_BYTES[arch] - PLACE_BYTES


def _tile(choice: Choice) -> Tile:
    wanted = int(choice["rows"]), int(choice["columns"])
    return next(tile for tile in (BIG, TALL, SMALL) if (tile.rows, tile.columns) == wanted)


def _padded(count: int, choice: Choice) -> int:
    return ceil_div(count, choice["columns"]) * choice["columns"]


def tile_count(problem: Problem, rows: int, columns: int) -> int:
    """Tiles of so many rows and columns, of all blocks and lanes."""
    tiles = ceil_div(problem.rows, rows) * ceil_div(problem.columns, columns)
    return tiles * problem.blocks * problem.lanes


def _variant(problem: Problem, tile: Tile, split: bool) -> Variant:
    partial = split and problem.dtype != "float32"
    return Variant(problem.dtype, problem.precision, tile, *accesses(problem), partial)


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


def spec(epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant. Raises UnsupportedError where its shared memory does not fit."""
    dtype, precision, tile, left, right, partial = variant
    words = [f"{tile.rows}x{tile.columns}", f"{left}/{right}", *["partial"] * partial]
    description = text.describe("kronecker_sparse", KIND, dtype, precision, words, epilogue)
    shared = shared_bytes(dtype, tile, left, right)
    if shared > _limit(arch):
        raise UnsupportedError(
            f"{description} needs {shared} bytes of shared memory, a block of {arch} has "
            f"{_limit(arch)}"
        )
    entry = "kronecker_sparse_portable"
    source = _source(epilogue, variant)
    made = KernelSpec("kronecker_sparse", source, entry, THREADS, shared, description=description)
    return named(made, dtype, *[precision] * (dtype == "float32"), *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant) -> str:
    """The generated CUDA text: types, ``Finish``, a few constants, one include."""
    dtype, precision, tile, left, right, partial = variant
    products = 3 if dtype == "float32" and precision == "fp32" else 1
    return f"""{text.preamble(dtype, "float32" if partial else dtype, epilogue)}
constexpr int TILE_ROWS = {tile.rows};
constexpr int TILE_COLUMNS = {tile.columns};
constexpr int STAGES = {tile.stages};
constexpr int MIN_BLOCKS = {tile.blocks};
constexpr int PRODUCTS = {products};
constexpr int PARAMETER_BYTES = {text.parameters(3, FIXED, epilogue).size};

#define ACCESS_LEFT Access::{left}
#define ACCESS_RIGHT Access::{right}

#include "kronecker_sparse/portable/portable.cuh"
"""


def shared_bytes(dtype: str, tile: Tile, left: str, right: str) -> int:
    """The stages of both operands, or the tile of sums that takes their place."""
    stage = _stage_bytes(dtype, tile.rows, left) + _stage_bytes(dtype, tile.columns, right)
    sums = 4 * max(tile.rows * (tile.columns + 8), tile.columns * (tile.rows + 4))
    return max(tile.stages * stage, sums)


def _stage_bytes(dtype: str, lines: int, access: str) -> int:
    itemsize = DTYPES[dtype].bytes
    if access != "line":
        return lines * LINE_BYTES
    return LINE_BYTES // itemsize * (lines * itemsize + (16 if itemsize == 2 else 32))


def pack_spec(dtype: str) -> KernelSpec:
    """The KernelSpec that packs a right operand of ``dtype``."""
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int PARAMETER_BYTES = {PACK_PARAMETERS.size};

#include "kronecker_sparse/portable/pack.cuh"
"""
    entry, words = "kronecker_sparse_portable_pack", f"kronecker_sparse weights packed {dtype}"
    made = KernelSpec("kronecker_sparse", source, entry, THREADS, description=words)
    return named(made, dtype)


def reduce_spec(dtype: str, bias: bool = False) -> KernelSpec:
    """The KernelSpec that adds up splits into an output of ``dtype``, and a bias's gradient if they
    have it."""
    source = f"""#include "common/types.cuh"

using OutputT = {DTYPES[dtype].cuda};

constexpr int PARAMETER_BYTES = {SUM_PARAMETERS[bias].size};
#define BIAS {int(bias)}

#include "kronecker_sparse/split_k_sum.cuh"
"""
    words = f"kronecker_sparse sum of splits {dtype}" + " bias" * bias
    entry = "kronecker_sparse_split_k_sum"
    made = KernelSpec("kronecker_sparse", source, entry, THREADS, description=words)
    return named(made, dtype, *["bias"] * bias)


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
    fixed = struct.pack(
        FIXED,
        *problem.left[:4], *problem.right[:4], *out[:4], split_stride,
        problem.rows, problem.columns, problem.depth, _split_depth(problem, count),
        problem.lanes, column_tiles, row_tiles, across, down, slab,
        _depth_first(problem, problem.left, problem.rows),
        _depth_first(problem, problem.right, problem.columns), along_rows, vectors,
    )  # fmt: skip
    return (slab * across, slabs), fixed


def _depth_first(problem: Problem, layout: Layout, lines: int) -> int:
    """Whether an operand's depths lie closer together than its lines."""
    return int(problem.depth > 1 and (lines == 1 or layout.depth <= layout.line))


def _stores(problem: Problem, out: OutLayout, itemsize: int) -> tuple[int, int]:
    """Whether rows lie closer together than columns, and whether the closer ones take 16-byte
    stores. Of what there is one of the stride does not count."""
    chunk = 16 // itemsize
    row = out.row if problem.rows > 1 else None
    column = out.column if problem.columns > 1 else None
    along_rows = row is not None and (column is None or row < column)
    near, far = (row, column) if along_rows else (column, row)
    others = (far, out.block if problem.blocks > 1 else 0, out.lane if problem.lanes > 1 else 0)
    whole = near == 1 and not any((stride or 0) % chunk for stride in others)
    return int(along_rows), int(whole and out.alignment % 16 == 0)


def _pack(problem: Problem, made: Layout) -> Step:
    """The launch that brings the right operand of a problem into the layout ``made``."""
    right, chunks = problem.right, made.line * DTYPES[problem.dtype].bytes // 16
    total = problem.blocks * problem.lanes * problem.columns * chunks
    lines_first = not _depth_first(problem, right, problem.columns)
    sizes = (problem.lanes, problem.columns, chunks, total, lines_first, 0)
    fixed = PACK_PARAMETERS.pack(*right[:4], problem.depth, *sizes)
    pointers = (("right", 0), ("workspace", 0))
    return Step(pack_spec(problem.dtype), (ceil_div(total, THREADS), 1), fixed, pointers)


def partial_layout(problem: Problem, bias: bool = False) -> tuple[OutLayout, int]:
    """Where one split's sums go, rows padded to whole runs, and the elements of one split. Rows
    with a sum for a bias end in a run of it."""
    pitch = round_up(problem.columns, REDUCE_RUN) + REDUCE_RUN * bias
    lane = problem.rows * pitch
    block = problem.lanes * lane
    return OutLayout(block, lane, pitch, 1), problem.blocks * block


def reduce_step(
    problem: Problem, partial: OutLayout, one: int, count: int, bias: bool = False
) -> Step:
    """The launch that adds up ``count`` splits of ``one`` element each, as :func:`partial_layout`
    says."""
    total = one // REDUCE_RUN
    if total > MAX_BLOCKS:
        raise UnsupportedError(
            f"a result of {one} elements is more than the sum of splits holds ({MAX_BLOCKS} runs "
            f"of {REDUCE_RUN}); call it on slices"
        )
    groups = next((some for some in (MOST_GROUPS, 4, 2) if count >= SPLITS_EACH * some), 1)
    sizes = (count, problem.lanes, problem.rows, problem.columns, partial.row // REDUCE_RUN, total)
    fixed = SUM_PARAMETERS[bias].pack(*problem.out[:4], one, *sizes, groups, 0)
    grid = (ceil_div(total * groups, THREADS), 1)
    pointers = (("workspace", 0), ("out", 0), *[("bias", 0)] * bias)
    return Step(reduce_spec(problem.dtype, bias), grid, fixed, pointers)
