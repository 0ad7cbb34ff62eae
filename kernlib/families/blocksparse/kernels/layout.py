"""The tensors of a layout made on a GPU, of a mask or of lists of indices.

Mark sets bits by indices, Count makes words of a mask and counts the blocks of each tile of 256
words, Scan makes sums of these and the layout's counts, Place writes the slots and clears what is
too many, Turn the words of columns. Each word and slot is written by one thread, and indices are
counted in integers: the result is the same each time.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

INDICES = {"int32": "int", "int64": "i64"}
MOST_FILLING = 1024  # blocks of threads that write slots without a block, beside the tiles
FILLED = 4096  # slots for each of those
TILE = 256  # words

MASK_OPERANDS = ("mask", "row_bits", "row_ranks", "col_bits", "rows", "cols", "counts")
INDEX_OPERANDS = ("given_rows", "given_cols", "given_heads", *MASK_OPERANDS[1:])


class Indices(NamedTuple):
    """Lists of blocks: of how many, their dtype, and whether they say heads."""

    count: int
    dtype: str
    heads: bool


class LayoutKernel(Kernel):
    """A step. Its subject is what it reads, where it is of several kinds."""

    role = "step"
    pointers: ClassVar[tuple[str, ...]]  # "" is what it reads
    fixed: ClassVar[Fields]
    threads: ClassVar[int] = TILE
    sums: ClassVar[bool] = False  # whether each warp has a word of shared memory

    def step(self, grid: int, of: str = "", reads: str = "", **numbers: int) -> Step:
        """The launch."""
        pointers = tuple((name or reads or of, 0) for name in self.pointers)
        return Step(self.spec(of), (grid, 1), self.fixed.pack(**numbers), pointers)

    def facts(self, of: str) -> dict[str, str | bool]:
        """Facts of the kernel alone."""
        return {}

    def spec(self, of: str = "", variant: None = None, arch: str = "") -> KernelSpec:
        """The specification of what is read."""
        size = Parameters(len(self.pointers), self.fixed.format).size
        facts = {"THREADS": self.threads, "PARAMETER_BYTES": size, **self.facts(of)}
        spec = KernelSpec(
            "blocksparse",
            self.source(facts, self.fixed.text()),
            self.entry,
            self.threads,
            4 * self.threads // 32 * self.sums,
            description=f"blocksparse layout {self.name} {of}".strip(),
        )
        return named(spec, of)


class Mark(LayoutKernel):
    """Bits by indices of a dtype."""

    name = "mark"
    header = "blocksparse/layout/mark.cuh"
    entry = "blocksparse_layout_mark"
    pointers = ("given_rows", "given_cols", "", "row_bits", "counts")
    fixed = Fields((
        "u32 count", "u32 grid_rows", "u32 grid_cols", "u32 n_heads", "u32 words_per_line",
        "u32 has_heads",
    ))  # fmt: skip

    def facts(self, of: str) -> dict[str, str | bool]:
        """Storage of indices."""
        return {"IndexT": INDICES[of]}


class Count(LayoutKernel):
    """Of "mask" or of "row_bits"."""

    name = "count"
    header = "blocksparse/layout/count.cuh"
    entry = "blocksparse_layout_count"
    pointers = ("", "row_bits", WORKSPACE)
    fixed = Fields(("u32 count", "u32 columns", "u32 words_per_line", "u32 unused"))
    sums = True

    def facts(self, of: str) -> dict[str, str | bool]:
        """What words are made of."""
        return {"FROM_MASK": of == "mask"}


class Scan(LayoutKernel):
    """Of the blocks of tiles."""

    name = "scan"
    header = "blocksparse/layout/scan.cuh"
    entry = "blocksparse_layout_scan"
    pointers = (WORKSPACE, "counts")
    # is_marked: whether the counts of duplicates and of indices out of range are there already.
    fixed = Fields(("u32 tiles", "u32 capacity", "u32 is_marked", "u32 unused"))
    threads = 1024
    sums = True


class Place(LayoutKernel):
    """The slots."""

    name = "place"
    header = "blocksparse/layout/place.cuh"
    entry = "blocksparse_layout_place"
    pointers = (WORKSPACE, "counts", "row_bits", "row_ranks", "rows", "cols")
    fixed = Fields(("u32 count", "u32 tiles", "u32 words_per_line", "u32 capacity"))
    sums = True


class Turn(LayoutKernel):
    """The words of columns."""

    name = "turn"
    header = "blocksparse/layout/turn.cuh"
    entry = "blocksparse_layout_turn"
    pointers = ("row_bits", "col_bits")
    fixed = Fields((
        "u32 tiles", "u32 grid_rows", "u32 grid_cols", "u32 words_per_row", "u32 words_per_col",
        "u32 unused",
    ))  # fmt: skip


MARK, COUNT, SCAN, PLACE, TURN = Mark(), Count(), Scan(), Place(), Turn()


def lower_mask(blocks: Blocks) -> Lowered:
    """The launches for a mask (heads, grid_rows, grid_cols) of bytes."""
    return _lowered(blocks, _count(blocks, "mask"), marked=False)


def lower_indices(blocks: Blocks, indices: Indices) -> Lowered:
    """The launches for lists of indices. Words of rows and counts must be 0 before."""
    marks = _mark(blocks, indices) if indices.count else ()
    return _lowered(blocks, (*marks, *_count(blocks, "row_bits")), marked=True)


def specs() -> list[KernelSpec]:
    """Every spec that a layout may take."""
    every = [MARK.spec(dtype) for dtype in INDICES]
    every += [COUNT.spec(source) for source in ("mask", "row_bits")]
    return [*every, *(kind.spec() for kind in (SCAN, PLACE, TURN))]


def _lowered(blocks: Blocks, first: tuple[Step, ...], marked: bool) -> Lowered:
    tiles, capacity = _tiles(blocks), blocks.capacity
    filling = min(ceil_div(capacity, FILLED), MOST_FILLING)
    scan = SCAN.step(1, tiles=tiles, capacity=capacity, is_marked=marked, unused=0)
    place = PLACE.step(
        max(tiles, filling, 1),
        count=_words(blocks),
        tiles=tiles,
        words_per_line=blocks.row_words,
        capacity=capacity,
    )
    return Lowered((*first, scan, place, *_turn(blocks)), workspace=4 * max(tiles, 1))


def _words(blocks: Blocks) -> int:
    return blocks.heads * blocks.grid_rows * blocks.row_words


def _tiles(blocks: Blocks) -> int:
    return ceil_div(_words(blocks), TILE)


def _mark(blocks: Blocks, indices: Indices) -> tuple[Step, ...]:
    step = MARK.step(
        ceil_div(indices.count, MARK.threads),
        indices.dtype,
        "given_heads" if indices.heads else "given_rows",
        count=indices.count,
        grid_rows=blocks.grid_rows,
        grid_cols=blocks.grid_cols,
        n_heads=blocks.heads,
        words_per_line=blocks.row_words,
        has_heads=indices.heads,
    )
    return (step,)


def _count(blocks: Blocks, source: str) -> tuple[Step, ...]:
    words = _words(blocks)
    if not words:
        return ()
    sizes = {"columns": blocks.grid_cols, "words_per_line": blocks.row_words}
    return (COUNT.step(_tiles(blocks), source, count=words, **sizes, unused=0),)


def _turn(blocks: Blocks) -> tuple[Step, ...]:
    tiles = blocks.heads * blocks.col_words * blocks.row_words
    if tiles == 0:
        return ()
    step = TURN.step(
        ceil_div(tiles, TURN.threads // 32),
        tiles=tiles,
        grid_rows=blocks.grid_rows,
        grid_cols=blocks.grid_cols,
        words_per_row=blocks.row_words,
        words_per_col=blocks.col_words,
        unused=0,
    )
    return (step,)
