"""Products with block-sparse matrices as lowering sees them: sizes, strides, names of dtypes.

Strides are in elements, alignments those of the first address in bytes, 16 at most. What a layout
holds is no part of a problem: one kernel, and one plan, serves all contents.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.lowering.arithmetic import ceil_div

WORD = 32  # blocks of a line that one word of a layout's bits says of


class Dense(NamedTuple):
    """A dense operand or result: from one batch, head, line and column to the next."""

    batch: int
    head: int
    line: int
    column: int
    alignment: int = 16


class Values(NamedTuple):
    """Stored blocks: from one batch, slot, row of a block and column of a block to the next."""

    batch: int
    slot: int
    row: int
    column: int
    alignment: int = 16


class Blocks(NamedTuple):
    """What of a layout does not change: rows and columns of a block, blocks in a column and in a
    row of a head's matrix, heads, and slots."""

    rows: int
    cols: int
    grid_rows: int
    grid_cols: int
    heads: int
    capacity: int

    @property
    def density(self) -> float:
        """What a layout stores, 1 at most, if all slots hold a block."""
        return min(1.0, self.capacity / max(1, self.grid_rows * self.grid_cols * self.heads))

    def filled(self, lines: int) -> float:
        """The part of the depth at which one of so many lines of blocks stores one, if all slots
        hold a block, anywhere."""
        return 1 - (1 - self.density) ** lines

    @property
    def row_words(self) -> int:
        """Words of a row of blocks."""
        return ceil_div(self.grid_cols, WORD)

    @property
    def col_words(self) -> int:
        """Words of a column of blocks."""
        return ceil_div(self.grid_rows, WORD)


class Spmm(NamedTuple):
    """``out[z, h, l, n] = sum_k op(S[z, h])[l, k] * dense[z, h, k, n]``, op(S) being S or, if
    ``transposed``, its transpose. A product with S on the right is one of its transpose: then a
    line of out is a column of the caller's result."""

    dtype: str
    precision: str  # of float32: "fp32" or "tf32"
    blocks: Blocks
    batch: int
    columns: int
    transposed: bool
    values: Values
    dense: Dense
    out: Dense
    summands: tuple[Dense, ...] = ()

    @property
    def op(self) -> Blocks:
        """The blocks of op(S)."""
        if not self.transposed:
            return self.blocks
        rows, cols, grid_rows, grid_cols, *others = self.blocks
        return Blocks(cols, rows, grid_cols, grid_rows, *others)

    @property
    def lines(self) -> int:
        """Of op(S), and of a head's result."""
        return self.op.rows * self.op.grid_rows


class Sdd(NamedTuple):
    """``values[z, slot] = sum_k a[z, h, row, k] * b[z, h, k, col]`` for the rows and columns of the
    slot's block, 0 in slots that hold none. ``a`` has a line for each row of the sparse matrix and
    a column for each k, ``b`` a line for each k and a column for each of the matrix's."""

    dtype: str
    precision: str
    blocks: Blocks
    batch: int
    depth: int
    a: Dense
    b: Dense
    values: Values
    summands: tuple[Values, ...] = ()


class Scope(NamedTuple):
    """What is known of products whose kernels are compiled ahead: rows and columns of a block,
    dtypes, the precision of float32, None for both, and the target."""

    block: tuple[int, int]
    dtypes: tuple[str, ...]
    precision: str | None = None
    arch: str = ""
