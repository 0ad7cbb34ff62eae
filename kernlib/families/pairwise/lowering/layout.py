"""How an operand of pairwise kernels lies in memory, and how far loads of it can run; and what the
direct kernel is told of tables of categorical features, as plain data (their device code is
kernel_sources/pairwise/direct/categories.cuh)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.parameters import Fields

TABLE_OPERANDS = ("a_codes", "b_codes", "tables")  # whose addresses stand ahead of the points'
MOST_ELEMENTS = 2**30 - 1  # of all tables, so that places in them add up within an int


class Layout(NamedTuple):
    """Strides, in elements, of (batch, points, features) or (batch, m, n), and the address of the
    first element modulo 16 (an aligned one may say 0 or 16)."""

    batch: int
    rows: int
    columns: int
    alignment: int = 16

    def transposed(self) -> Layout:
        return Layout(self.batch, self.columns, self.rows, self.alignment)


def access(layout: Layout, points: int, features: int, dtype: str) -> str:
    """How far 16-byte loads (8 bytes of a half type) of an operand of so many points and features
    can run: see Access in operand.cuh."""
    itemsize = DTYPES[dtype].bytes
    run = 4 if itemsize == 2 else 16 // itemsize
    if layout.alignment % (run * itemsize) or layout.batch % run:
        return "strided"
    if layout.columns == 1 and features % run == 0 and layout.rows % run == 0:
        return "features"
    if layout.rows == 1 and points % run == 0 and layout.columns % run == 0:
        return "points"
    return "strided"


class Categories(NamedTuple):
    """Codes (batch, points, features) of a and of b, and how many categories each feature has."""

    a: Layout
    b: Layout
    sizes: tuple[int, ...]
    table_batch: int  # elements from one entry's tables to the next, 0 for the same ones
    wide: bool  # codes are of 64 bits, else of 32
    by_rows: bool = True  # codes of a choose rows of tables, else columns

    def transposed(self) -> Categories:
        """The same with a and b exchanged."""
        return self._replace(a=self.b, b=self.a, by_rows=not self.by_rows)

    def pack(self) -> bytes:
        """The struct of that name."""
        padding = {"padding": 0} if len(self.sizes) % 2 else {}
        return table_fields(len(self.sizes)).pack(
            a_view=self.a[:3],
            b_view=self.b[:3],
            table_batch=self.table_batch,
            wide=self.wide,
            by_rows=self.by_rows,
            sizes=self.sizes,
            **padding,
        )


@cache
def table_fields(count: int) -> Fields:
    """What a plan fixes of tables of so many features; nothing where there are none."""
    if not count:
        return Fields(())
    return Fields((
        "View a_view", "View b_view",  # (batch, point, feature) of codes
        "i64 table_batch",  # from one entry's tables to the next
        "int wide",  # whether codes are of 64 bits
        "int by_rows",  # whether codes of a choose rows of tables, and not columns
        f"int sizes[{count}]",
        *["int padding"] * (count % 2),
    ))  # fmt: skip


def group_bytes(tile: int) -> int:
    """Shared memory for codes and tables, of which the stages have as much."""
    return 256 * tile
