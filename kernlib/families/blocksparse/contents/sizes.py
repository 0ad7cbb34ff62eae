"""The fixed parts of a layout: sizes of blocks, the grid, heads and capacity, and their text."""

from __future__ import annotations

from functools import lru_cache

from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import as_int, shown, whole
from kernlib.families.blocksparse.lowering.problem import Blocks

NAMES = ("row_bits", "row_ranks", "col_bits", "rows", "cols", "counts")
SIZES = len(NAMES)  # the place of the tensor whose shape says the sizes, behind these
BLOCKS = (16, 32, 64, 128)  # rows or columns of a block
MOST = 2**31 - 1  # blocks of all heads, and slots
COUNTS = 4  # live, dropped for capacity, dropped as duplicates, dropped as out of range
DROPPED = ("for want of capacity", "as duplicates", "as out of range")


def layout_text(block: tuple, grid: tuple, heads: int | None, capacity: int) -> str:
    """The text of :attr:`Layout.text`: ``64x64 blocks, 8x16 grid, 4 heads, capacity 300``."""
    count = "no heads" if heads is None else f"{heads} heads"
    return f"{block[0]}x{block[1]} blocks, {grid[0]}x{grid[1]} grid, {count}, capacity {capacity}"


def parse_layout(
    text: str,
) -> tuple[tuple[int, int], tuple[int, int], int | None, int]:
    """Rows and columns of a block, those of the grid, heads or None, and capacity."""
    return _parse(text) if is_dynamo_compiling() else _parsed(text)


def _parse(text: str) -> tuple[tuple[int, int], tuple[int, int], int | None, int]:
    block, grid, heads, capacity = [part.split(" ") for part in text.split(", ")]
    block_rows, block_cols = block[0].split("x")
    grid_rows, grid_cols = grid[0].split("x")
    head_count = None if heads[0] == "no" else int(heads[0])
    sizes = (int(block_rows), int(block_cols)), (int(grid_rows), int(grid_cols))
    return *sizes, head_count, int(capacity[1])


_parsed = lru_cache(maxsize=4096)(_parse)  # Dynamo warns of it


def form_text(block: tuple, has_heads: bool) -> str:
    """The text of :attr:`Layout.form`: ``64x64 blocks``, or ``64x64 blocks of heads``."""
    return f"{block[0]}x{block[1]} blocks{' of heads' * has_heads}"


def is_form(text: str) -> bool:
    """Whether a text says no sizes, as :func:`layout_text` does."""
    return "," not in text


def count_of(text: str) -> int:
    """With how many tensors a layout's text or form goes."""
    return len(NAMES) + is_form(text)


@lru_cache(maxsize=64)
def parse_form(text: str) -> tuple[tuple[int, int], bool]:
    """Rows and columns of a block, and whether there are heads."""
    block, *rest = text.split(" ")
    rows, cols = block.split("x")
    return (int(rows), int(cols)), "heads" in rest


def sizes_shape(grid: tuple, heads: int | None) -> tuple[int, int, int, int]:
    """The shape of the tensor that carries the sizes, each plus two, as torch.compile makes
    constants of 0 and 1. A 0 stands for no heads: it shall be no symbol."""
    return 0 if heads is None else heads + 2, grid[0] + 2, grid[1] + 2, 0


def blocks_of(block: tuple, grid: tuple, heads: int | None, capacity: int) -> Blocks:
    """The sizes for lowering: one head where the layout has none."""
    return Blocks(*block, *grid, 1 if heads is None else heads, capacity)


def tensor_shapes(blocks: Blocks) -> tuple[tuple[int, ...], ...]:
    """The shapes of the six tensors, in the order of ``NAMES``."""
    rows, cols = blocks.heads * blocks.grid_rows, blocks.heads * blocks.grid_cols
    words = (rows, blocks.row_words)
    return words, words, (cols, blocks.col_words), *((blocks.capacity,),) * 2, (COUNTS,)


def checked_block(block: object) -> tuple[int, int]:
    """Rows and columns of a block. Raises TypeError for what is neither an int nor two of them,
    ValueError for sizes that no kernel takes."""
    pair = block if isinstance(block, (tuple, list)) else (block, block)
    if len(pair) != 2 or not all(is_int(size) for size in pair):
        raise TypeError(f"block must be an int or two (rows, columns), got {shown(block)}")
    if not all(size in BLOCKS for size in pair):
        choices = ", ".join(map(str, BLOCKS))
        raise ValueError(f"block must have rows and columns in {choices}, got {shown(block)}")
    return int(pair[0]), int(pair[1])


def checked_grid(grid: object) -> tuple[int, int]:
    """Rows and columns of blocks. Raises TypeError for what is not two ints, ValueError for sizes
    below 0."""
    if not isinstance(grid, (tuple, list)) or len(grid) != 2 or not all(map(is_int, grid)):
        raise TypeError(f"grid must be two ints (rows and columns of blocks), got {shown(grid)}")
    if min(grid) < 0:
        raise ValueError(f"grid must have sizes of at least 0, got {tuple(grid)}")
    return int(grid[0]), int(grid[1])


def checked_count(name: str, value: object, least: int) -> int:
    """Raises TypeError for what is no int, ValueError for one that is not ``least`` to MOST."""
    number = as_int(name, value)
    if not least <= number <= MOST:
        raise ValueError(f"{name} must be {least} to {MOST}, got {shown(number)}")
    return number


def check_positions(grid: tuple[int, int], heads: int | None) -> None:
    """Raises ValueError for more blocks than an int32 counts."""
    positions = grid[0] * grid[1] * (1 if heads is None else heads)
    lines = max(grid) * (1 if heads is None else heads)
    if max(positions, lines) > MOST:
        raise ValueError(
            f"a layout has at most {MOST} places for blocks, got {grid[0]} * {grid[1]} of "
            f"{heads or 1} heads; use larger blocks"
        )


def is_int(value: object) -> bool:
    """Whether it is a whole number and no truth value."""
    return whole(value) is not None
