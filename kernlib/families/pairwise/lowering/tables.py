"""What the direct kernel is told of tables of categorical features, as plain data; their code is
kernel_sources/pairwise/direct/categories.cuh."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.lowering.parameters import Fields

TABLE_OPERANDS = ("a_codes", "b_codes", "tables")  # whose addresses stand ahead of the points'
MOST_ELEMENTS = 2**30 - 1  # of all tables, so that places in them add up within an int


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

    def launched(self, swapped: bool) -> tuple[tuple[str, ...], bytes]:
        """The operands ahead of the points' and the struct of that name, of a launch that may have
        a and b exchanged."""
        a_codes, b_codes, tables = TABLE_OPERANDS
        operands = (b_codes, a_codes, tables) if swapped else TABLE_OPERANDS
        return operands, (self.transposed() if swapped else self).pack()

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
    """What a plan fixes of tables of so many features."""
    return Fields((
        "View a_view", "View b_view",  # (batch, point, feature) of codes
        "i64 table_batch",  # from one entry's tables to the next
        "int wide",  # whether codes are of 64 bits
        "int by_rows",  # whether codes of a choose rows of tables, and not columns
        f"int sizes[{count}]",
        *["int padding"] * (count % 2),
    ))  # fmt: skip
