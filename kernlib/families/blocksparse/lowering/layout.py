"""The tensors of a layout made on a GPU, of a mask or of lists of indices: layout/*.cuh.

``mark`` sets bits by indices, ``count`` makes words of a mask and counts the blocks of each tile of
256 words, ``scan`` makes sums of these and the layout's counts, ``place`` writes the slots and
clears what is too many, ``turn`` the words of columns. Each word and slot is written by one thread,
and indices are counted in integers: the result is the same each time.
"""

from __future__ import annotations

from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.records import NamedTuple

FAMILY = "blocksparse"
THREADS = {"mark": 256, "count": 256, "scan": 1024, "place": 256, "turn": 256}
PARAMETERS = {
    "mark": Parameters(5, "<6I"),
    "count": Parameters(3, "<3I4x"),
    "scan": Parameters(2, "<4I"),
    "place": Parameters(6, "<4I"),
    "turn": Parameters(2, "<6I"),
}
SUMS = ("count", "scan", "place")  # with a word of shared memory for each warp
INDICES = {"int32": "int", "int64": "i64"}
MOST_FILLING = 1024  # blocks of threads that write slots without a block, beside the tiles
FILLED = 4096  # slots for each of those

MASK_OPERANDS = ("mask", "row_bits", "row_ranks", "col_bits", "rows", "cols", "counts")
INDEX_OPERANDS = ("given_rows", "given_cols", "given_heads", *MASK_OPERANDS[1:])


class Indices(NamedTuple):
    """Lists of blocks: of how many, their dtype, and whether they say heads."""

    count: int
    dtype: str
    heads: bool


def lower_mask(blocks: Blocks) -> Lowered:
    """The launches for a mask (heads, grid_rows, grid_cols) of bytes."""
    counted = _count(blocks, "mask") if _words(blocks) else ()
    return _lowered(blocks, counted, marked=False)


def lower_indices(blocks: Blocks, indices: Indices) -> Lowered:
    """The launches for lists of indices. Words of rows and counts must be 0 before."""
    marks = _mark(blocks, indices) if indices.count else ()
    counted = _count(blocks, "row_bits") if _words(blocks) else ()
    return _lowered(blocks, (*marks, *counted), marked=True)


def specs() -> list[KernelSpec]:
    """Every spec that a layout may take."""
    made = [spec("mark", dtype) for dtype in INDICES]
    made += [spec("count", source) for source in ("mask", "row_bits")]
    return [*made, *(spec(kind) for kind in ("scan", "place", "turn"))]


def spec(kind: str, of: str = "") -> KernelSpec:
    """The KernelSpec of a launch: of "mark" for a dtype of indices, of "count" for "mask" or
    "row_bits"."""
    lines = [f"constexpr int THREADS = {THREADS[kind]};"]
    lines.append(f"constexpr int PARAMETER_BYTES = {PARAMETERS[kind].size};")
    if kind == "mark":
        lines.append(f"using IndexT = {INDICES[of]};")
    if kind == "count":
        lines.append(f"constexpr bool FROM_MASK = {str(of == 'mask').lower()};")
    text = "\n".join(lines)
    source = f"""#include "common/types.cuh"

{text}

#include "blocksparse/layout/{kind}.cuh"
"""
    entry, words = f"blocksparse_layout_{kind}", f"blocksparse layout {kind} {of}".strip()
    shared = 4 * THREADS[kind] // 32 if kind in SUMS else 0
    made = KernelSpec(FAMILY, source, entry, THREADS[kind], shared, description=words)
    return named(made, of)


def _lowered(blocks: Blocks, first: tuple[Step, ...], marked: bool) -> Lowered:
    steps = (*first, _scan(blocks, marked), _place(blocks), *_turn(blocks))
    return Lowered(steps, workspace=4 * max(_tiles(blocks), 1))


def _words(blocks: Blocks) -> int:
    return blocks.heads * blocks.grid_rows * blocks.row_words


def _tiles(blocks: Blocks) -> int:
    return ceil_div(_words(blocks), THREADS["count"])


def _step(kind: str, of: str, grid: int, pointers: tuple[str, ...], *fixed: int) -> Step:
    found = tuple((name, 0) for name in pointers)
    return Step(spec(kind, of), (grid, 1), PARAMETERS[kind].pack(*fixed), found)


def _mark(blocks: Blocks, indices: Indices) -> tuple[Step, ...]:
    heads = "given_heads" if indices.heads else "given_rows"
    pointers = "given_rows", "given_cols", heads, "row_bits", "counts"
    sizes = blocks.grid_rows, blocks.grid_cols, blocks.heads, blocks.row_words
    grid = ceil_div(indices.count, THREADS["mark"])
    fixed = indices.count, *sizes, indices.heads
    return (_step("mark", indices.dtype, grid, pointers, *fixed),)


def _count(blocks: Blocks, source: str) -> tuple[Step, ...]:
    pointers = source, "row_bits", WORKSPACE
    fixed = _words(blocks), blocks.grid_cols, blocks.row_words
    return (_step("count", source, _tiles(blocks), pointers, *fixed),)


def _scan(blocks: Blocks, marked: bool) -> Step:
    fixed = _tiles(blocks), blocks.capacity, marked, 0
    return _step("scan", "", 1, (WORKSPACE, "counts"), *fixed)


def _place(blocks: Blocks) -> Step:
    filling = min(ceil_div(blocks.capacity, FILLED), MOST_FILLING)
    pointers = WORKSPACE, "counts", "row_bits", "row_ranks", "rows", "cols"
    fixed = _words(blocks), _tiles(blocks), blocks.row_words, blocks.capacity
    return _step("place", "", max(_tiles(blocks), filling, 1), pointers, *fixed)


def _turn(blocks: Blocks) -> tuple[Step, ...]:
    tiles = blocks.heads * blocks.col_words * blocks.row_words
    if tiles == 0:
        return ()
    sizes = blocks.grid_rows, blocks.grid_cols, blocks.row_words, blocks.col_words
    grid = ceil_div(tiles, THREADS["turn"] // 32)
    return (_step("turn", "", grid, ("row_bits", "col_bits"), tiles, *sizes, 0),)
