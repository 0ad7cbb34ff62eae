"""Softmax over the rows of block-sparse matrices as lowering sees it: sizes, strides, names of
dtypes, and what of a call is part of the code.

Sizes and strides are launch arguments: one kernel serves every layout of one width of blocks, as
do the warps that share a row.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.blocksparse.lowering.problem import Blocks

MOST_ACROSS = 2**31 - 1  # of a grid
MASKS = (None, "add", "mul", "bool")  # kinds, by their numbers in softmax.cuh


class Operand(NamedTuple):
    """A tensor: strides in elements, 0 along what broadcasts, and the alignment of its first
    address in bytes, 16 at most. Strides of values are those of the batch's outer and inner
    dimension, slots, rows and columns of a block; of rpe and masks those of the batch's two
    dimensions, heads, lines and columns of the matrix."""

    strides: tuple[int, int, int, int, int]
    alignment: int = 16


class Options(NamedTuple):
    """What of a call is part of the code: masks are of a kind of MASKS."""

    causal: bool = False
    rpe: bool = False
    key: str | None = None
    attn: str | None = None


class Softmax(NamedTuple):
    """Of values over the rows of a matrix; ``batch`` is its outer and inner dimension. ``rpe``,
    ``key`` and ``attn`` are None where ``options`` have none."""

    dtype: str
    blocks: Blocks
    batch: tuple[int, int]
    options: Options
    x: Operand
    out: Operand
    rpe: Operand | None = None
    key: Operand | None = None
    attn: Operand | None = None


class Gradient(NamedTuple):
    """Of a softmax by its logits and by x, both of the strides of ``out``."""

    dtype: str
    blocks: Blocks
    batch: tuple[int, int]
    y: Operand
    grad: Operand
    out: Operand


def takes(blocks: Blocks) -> bool:
    """Whether a grid holds the rows, of fewer than 2**31 tasks, and an int the number of a
    column."""
    rows = blocks.heads * blocks.grid_rows * blocks.rows
    return max(rows, blocks.grid_cols * blocks.cols) <= MOST_ACROSS
