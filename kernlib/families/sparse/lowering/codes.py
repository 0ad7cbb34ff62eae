"""The formats u8, u4 and u2 as numbers, of which their layout and kernels are made: see
:mod:`kernlib.families.sparse.formats.slices`."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.lowering.arithmetic import ceil_div

LANES = 32  # rows of a slice
SHORT_ROWS = 65535  # most rows whose numbers are 2 bytes
WIDEST = 4096  # bytes of a vector in a panel, as kernels take them
MOST_SIZE = 2**31 - 1  # rows and columns, as int32 rows and kernels count them


class Code(NamedTuple):
    """A format by its name and the bits of a step."""

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
    def whole(self) -> int:
        """Codes of a whole group."""
        return 16 if self.bits == 2 else 8

    @property
    def unit(self) -> int:
        """Codes of whole bytes: lengths are multiples."""
        return 8 // self.bits

    def size(self, itemsize: int) -> int:
        """Bytes of one code of each lane."""
        return LANES * itemsize + LANES * self.bits // 8


U8, U4, U2 = Code("u8", 8), Code("u4", 4), Code("u2", 2)


def grid(shape: tuple[int, int], width: int) -> tuple[int, int]:
    """Panels of a matrix, and slices of a panel."""
    return ceil_div(shape[1], width), ceil_div(shape[0], LANES)
