"""The numbers that define the formats u8, u4 and u2, for their encoding and their kernels: see
:mod:`kernlib.families.sparse.formats.slices`."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.lowering.arithmetic import ceil_div

LANES = 32  # rows of a slice
SHORT_ROWS = 65535  # most rows of a matrix whose row numbers have 2 bytes
ROW_TYPES = ("u16", "u32")  # CUDA types of row numbers
WIDEST = 4096  # most bytes of a vector that belong to one panel
WIDEST_IN_PARTS = 56 * 1024  # the same where rows are cut into parts: shared memory holds them
MOST_PARTS = 32  # into which a row is cut: a block has a warp for each
MOST_SIZE = 2**31 - 1  # most rows and columns: they are counted by 32 bits


class Code(NamedTuple):
    """A format: its name, and the bits of a step from column to column."""

    name: str
    bits: int

    @property
    def least(self) -> int:
        """The step whose bits are all zero."""
        return 1 if self.bits == 2 else 0

    @property
    def mask(self) -> int:
        """The bits of the longest step."""
        return (1 << self.bits) - 1

    @property
    def longest(self) -> int:
        """The longest step."""
        return self.mask + self.least

    @property
    def group(self) -> int:
        """The codes of a group that is full."""
        return 16 if self.bits == 2 else 8

    @property
    def unit(self) -> int:
        """The codes whose steps fill a byte. Lengths of slices are multiples of it."""
        return 8 // self.bits

    def size(self, itemsize: int) -> int:
        """Bytes of one code of each lane."""
        return LANES * itemsize + LANES * self.bits // 8


U8, U4, U2 = Code("u8", 8), Code("u4", 4), Code("u2", 2)
CODES = {code.name: code for code in (U8, U4, U2)}  # by the names of these formats
SLICES = tuple(CODES)


def grid(shape: tuple[int, int], width: int) -> tuple[int, int]:
    """The numbers of panels of a matrix, and of slices of a panel."""
    return ceil_div(shape[1], width), ceil_div(shape[0], LANES)


def row_type(rows: int) -> str:
    """The CUDA type of the row numbers of a matrix."""
    return ROW_TYPES[rows > SHORT_ROWS]
