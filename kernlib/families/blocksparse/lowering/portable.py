"""The kernel of kernel_sources/blocksparse/portable/portable.cuh: products of a block-sparse and a
dense matrix by mma.sync, for any strides, on every GPU.

A block of threads takes 128 lines of the result, which are one to eight lines of blocks, by up to
128 columns; few columns take smaller tiles, down to 32 lines by 16 columns.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering import parts, times
from kernlib.families.blocksparse.lowering.problem import Dense, Spmm
from kernlib.families.blocksparse.lowering.times import Rate
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

KIND = "portable"
PRECISION = True  # variants() takes it
MOST_X, MOST_Y = 2**31 - 1, 65535  # of a grid
SIDE = "4q"  # struct Side
FIXED = "14q4iq8I"  # struct Fixed
NAMES = ("row_bits", "row_ranks", "col_bits", "values", "dense", "out")
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


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    lines: int  # of a block of op(S)
    depth: int
    transposed: bool
    tile: Tile
    values: str  # how far 16-byte copies can run: see Access in operand.cuh
    dense: str
    along_lines: bool  # lines lie closer together in the result than columns
    partial: bool = False  # whether sums of parts of the depth are left to parts.cuh


def takes(problem: Spmm, arch: str) -> bool:
    """Whether the kernel computes a problem: all of them."""
    return isinstance(problem, Spmm)


def candidates(problem: Spmm, arch: str) -> list[Choice]:
    """The tiles that a problem's columns fill, largest first; there is always one. Then the same
    with several parts of the depth."""
    known = tiles(problem.dtype, problem.precision)
    fitting = [tile.columns for tile in known if tile.columns < 2 * problem.columns]
    fitting = fitting or [known[-1].columns]
    counts = parts.counts(parts.sums_of(problem, False), depth_blocks(problem))
    split = product((columns for columns in fitting if columns <= PARTS_COLUMNS), counts)
    return [
        *({"columns": columns} for columns in fitting),
        *({"columns": columns, "parts": count} for columns, count in split),
    ]


def default(problem: Spmm, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: what takes least by rule; of equals the first."""
    return min(known, key=lambda choice: microseconds(problem, choice, multiprocessors))


def best_microseconds(problem: Spmm, arch: str, multiprocessors: int) -> float:
    """What the default takes by rule."""
    known = candidates(problem, arch)
    return min(microseconds(problem, choice, multiprocessors) for choice in known)


def microseconds(problem: Spmm, choice: Choice, multiprocessors: int) -> float:
    """What a candidate takes by rule."""
    tile, split = _tile(problem, choice), int(choice.get("parts", 1))
    blocks, itemsize = problem.blocks, DTYPES[problem.dtype].bytes
    lines, depth = (blocks.cols, blocks.rows) if problem.transposed else blocks[:2]
    deep = ceil_div(depth_blocks(problem), split)
    split = ceil_div(depth_blocks(problem), deep)
    count = _tile_count(problem, tile) * split
    stored = deep * times.filled(blocks.density, max(1, tile.lines // lines))
    stored = max(stored, min(1.0, multiprocessors / count))  # one tile at least has a block
    rate, slower = RATES[is_split(problem.dtype, problem.precision), tile.columns]
    stages = stored * depth * itemsize / tile.depth_bytes + FILLING
    stages *= slower if depth == 16 else 1.0
    sums = parts.sums_of(problem, False)
    own = START + times.stages(count, stages, rate, multiprocessors)
    return own + times.adding_up(sums.elements, split)


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Spmm,
    arch: str,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem, with the tile of ``choice``, one of :func:`candidates`. Raises
    UnsupportedError for sizes that no grid can hold."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    tile = _tile(problem, choice)
    split = int(choice.get("parts", 1))
    made = variant(problem, tile)._replace(partial=split > 1)
    count = _tile_count(problem, tile) // problem.batch
    if count * split > MOST_X:
        raise UnsupportedError(
            f"a product of {problem.blocks.heads} heads with {problem.lines} x {problem.columns} "
            f"results is more than one launch holds ({MOST_X} tiles of {tile.lines} x "
            f"{tile.columns}); call it on slices"
        )
    if split > 1:
        return _in_parts(epilogue, problem, made, arch, split)
    pointers = tuple((name, 0) for name in NAMES)
    sides = [number for side in problem.summands for number in side[:4]]
    step = Step(
        spec(epilogue, made, arch),
        (count, min(problem.batch, MOST_Y)),
        parameters(epilogue).pack(*_numbers(problem, tile), *sides),
        (*pointers, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue)),
        text.scalar_count(epilogue),
    )
    return Lowered((step,))


def _in_parts(
    epilogue: tuple[Epilogue, ...], problem: Spmm, made: Variant, arch: str, split: int
) -> Lowered:
    """The launches of so many parts of the depth, fewer if whole blocks come out so."""
    deep = ceil_div(depth_blocks(problem), split)
    split = ceil_div(depth_blocks(problem), deep)
    count = _tile_count(problem, made.tile) // problem.batch
    sums = parts.sums_of(problem, made.along_lines)
    pointers = (*((name, 0) for name in NAMES[:-1]), (WORKSPACE, 0))
    main = Step(
        spec((), made, arch),
        (count * split, min(problem.batch, MOST_Y)),
        parameters(()).pack(*_numbers(problem, made.tile, sums, deep)),
        pointers,
    )
    last = parts.step(epilogue, problem, sums, split, arch)
    return Lowered((main, last), 4 * sums.elements * split)


def variants(
    epilogue: tuple[Epilogue, ...],
    block: tuple[int, int],
    dtypes: tuple[str, ...],
    arch: str,
    precision: str | None = None,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size. ``precision`` is float32's,
    None for both."""
    found, flags = parts.variants(epilogue, dtypes, False), (False, True)
    for kind, turned in product(numbers(dtypes, precision), (False, True)):
        sizes = block[::-1] if turned else block
        near = "line" if turned else "depth"
        for tile, *ends in product(
            tiles(*kind), (near, "gather"), ("depth", "line", "gather"), flags, flags
        ):
            made = Variant(*kind, *sizes, turned, tile, *ends)
            if made.partial and tile.columns > PARTS_COLUMNS:
                continue
            found.append(spec(epilogue, made, arch))
    return found


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


def variant(problem: Spmm, tile: Tile) -> Variant:
    """The kernel of a problem, for a tile."""
    sizes = problem.blocks.rows, problem.blocks.cols
    lines, depth = sizes[::-1] if problem.transposed else sizes
    return Variant(
        problem.dtype,
        problem.precision,
        lines,
        depth,
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
    whole = values.alignment % CHUNK_BYTES == 0 and not any(stride % chunk for stride in apart)
    if values.column != 1 or not whole:
        return "gather"
    return "line" if problem.transposed else "depth"


def spec(epilogue: tuple[Epilogue, ...], made: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant; parts of sums take no epilogue."""
    epilogue = () if made.partial else epilogue
    tile, dtype, precision = made.tile, made.dtype, made.precision
    words = [f"{made.lines}x{made.depth}"] + ["transposed"] * made.transposed
    words += [f"{tile.lines}x{tile.columns}", f"{made.values}/{made.dense}"]
    words += ["along_lines"] * made.along_lines + ["partial"] * made.partial
    found = KernelSpec(
        "blocksparse",
        _source(epilogue, made, arch),
        "blocksparse_portable",
        32 * tile.warps,
        shared_bytes(made, arch),
        description=text.describe("blocksparse", KIND, dtype, precision, words, epilogue),
    )
    return named(found, dtype, *[precision] * (dtype == "float32"), *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], made: Variant, arch: str) -> str:
    """The generated CUDA text: types, ``Finish``, constants, one include."""
    tile = made.tile
    facts = {
        "TRANSPOSED": made.transposed,
        "GROUPS": max(1, tile.lines // made.lines),
        "PARTIAL": made.partial,
    }
    out_dtype = "float32" if made.partial else made.dtype
    return f"""{text.preamble(made.dtype, out_dtype, epilogue, **facts)}
constexpr int LINES = {made.lines};
constexpr int DEPTH = {made.depth};
constexpr bool TRANSPOSED = {str(made.transposed).lower()};
constexpr int TILE_LINES = {tile.lines};
constexpr int TILE_COLUMNS = {tile.columns};
constexpr int GROUPS = {max(1, tile.lines // made.lines)};
constexpr int WARPS = {tile.warps};
constexpr int WARP_LINES = {tile.warp_lines};
constexpr int WARP_COLUMNS = {tile.warp_columns};
constexpr int DEPTH_BYTES = {tile.depth_bytes};
constexpr int STAGES = {stages(tile, arch)};
constexpr int MIN_BLOCKS = {tile.blocks};
constexpr int PRODUCTS = {3 if is_split(made.dtype, made.precision) else 1};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};
constexpr bool ALONG_LINES = {str(made.along_lines).lower()};
constexpr bool PARTIAL = {str(made.partial).lower()};

#define ACCESS_VALUES Access::{made.values}
#define ACCESS_DENSE Access::{made.dense}

#include "blocksparse/portable/portable.cuh"
"""


def stages(tile: Tile, arch: str) -> int:
    """Stages under way: one more where a multiprocessor has shared memory for it."""
    return tile.stages + (targets.SHARED_BYTES[arch] >= LARGE_SHARED)


def shared_bytes(made: Variant, arch: str) -> int:
    """The stages of both operands, or the sums that take their place."""
    tile = made.tile
    waiting = waiting_bytes(tile.warps, tile.warp_lines, tile.warp_columns, made.along_lines)
    return max(stages(tile, arch) * tile.depth_bytes * (tile.lines + tile.columns), waiting)


def waiting_bytes(warps: int, lines: int, columns: int, along_lines: bool) -> int:
    """Sums on their way to the result: see store.cuh."""
    lines = min(lines, PASS_LINES)
    return 4 * warps * (columns * (lines + 4) if along_lines else lines * (columns + 8))


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: the layout's words, operands, the epilogue's, strides and sizes."""
    sides = SIDE * len(text.summands(epilogue))
    return text.parameters(len(NAMES), f"<{FIXED}{sides}", epilogue)


def _numbers(
    problem: Spmm, tile: Tile, sums: parts.Sums | None = None, part_blocks: int = 0
) -> list[int]:
    """Struct Fixed, of a result or of ``sums`` of parts of the depth."""
    values, dense, out, blocks = problem.values, problem.dense, problem.out, problem.blocks
    turned = problem.transposed
    ends = (values.column, values.row) if turned else (values.row, values.column)
    grid = (blocks.grid_rows, blocks.grid_cols)
    words = blocks.col_words if turned else blocks.row_words
    view, stride, whole = out[:4], 0, stores(problem)[1]
    if sums is not None:
        view, stride, whole = sums.side, sums.elements, True
    return [
        *(values.batch, values.slot, *ends, *dense[:4], *view),
        *(problem.lines, problem.columns),
        *(grid[::-1] if turned else grid),
        *(words, blocks.row_words, stride),
        *(ceil_div(problem.lines, tile.lines), ceil_div(problem.columns, tile.columns)),
        *(_tile_count(problem, tile) // problem.batch, part_blocks),
        *(problem.batch, ends[1] <= ends[0], dense.line <= dense.column, whole),
    ]


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
    whole = near == 1 and out.alignment % CHUNK_BYTES == 0 and (far or 0) % chunk == 0
    outer = zip(out[:2], _batches(problem), strict=True)
    whole = whole and not any(stride % chunk for stride, count in outer if count > 1)
    return along_lines, whole and (along_lines or problem.columns % chunk == 0)


def _batches(problem: Spmm) -> tuple[int, int]:
    return problem.batch, problem.blocks.heads


def is_split(dtype: str, precision: str) -> bool:
    """Whether numbers are words of TF32 and what is left of them."""
    return dtype == "float32" and precision == "fp32"


def _tile(problem: Spmm, choice: Choice) -> Tile:
    known = tiles(problem.dtype, problem.precision)
    return next(tile for tile in known if tile.columns == int(choice["columns"]))


def _tile_count(problem: Spmm, tile: Tile) -> int:
    across = ceil_div(problem.lines, tile.lines) * ceil_div(problem.columns, tile.columns)
    return across * problem.blocks.heads * problem.batch
