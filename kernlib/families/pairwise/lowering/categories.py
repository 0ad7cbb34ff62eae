"""Tables of categorical features beside the direct kernel: what it is told of them, as plain data.

The device code is ``kernel_sources/pairwise/direct/categories.cuh``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.families.pairwise.lowering.layout import Layout

OPERANDS = ("a_codes", "b_codes", "tables")  # whose addresses stand ahead of those of the points
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

    def pack(self) -> bytes:
        """The struct of that name, padded to 8 bytes."""
        views = [x for v in (self.a, self.b) for x in (v.batch, v.rows, v.columns)]
        ints = (int(self.wide), int(self.by_rows), *self.sizes)
        fixed = struct.pack(f"<7q{len(ints)}i", *views, self.table_batch, *ints)
        return fixed + bytes(-len(fixed) % 8)


def group_bytes(tile: int) -> int:
    """Shared memory for codes and tables, of which the stages have as much."""
    return 256 * tile
