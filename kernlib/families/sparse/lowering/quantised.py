"""The numbers that define the bitmap formats whose values have fewer bits, for their encoding and
their kernels: see :mod:`kernlib.families.sparse.formats.quantised`."""

from __future__ import annotations

from typing import NamedTuple


class ValueCode(NamedTuple):
    """What stands for a value: its name, its bits, the largest magnitude, the columns that share a
    scale, and the code that no value has, among the bits of a ``mask``: -128, NaN of both signs,
    and -8."""

    values: str
    bits: int
    largest: int
    columns: int
    unused: int
    mask: int

    @property
    def format(self) -> str:
        """The name of the format."""
        return f"bitmap-{self.values}"

    @property
    def groups(self) -> int:
        """The scales of a row of a chunk."""
        return 256 // self.columns

    @property
    def offset(self) -> int:
        """The byte of a chunk where its codes begin, behind the bits and scales."""
        return 512 + 16 * self.groups * 2

    @property
    def most(self) -> int:
        """Bytes of the codes of a chunk without a zero."""
        return 4096 * self.bits // 8


INT8, FP8, INT4 = (
    ValueCode("int8", 8, 127, 256, 0x00, 0xFF),
    ValueCode("fp8", 8, 448, 256, 0x7F, 0x7F),
    ValueCode("int4", 4, 7, 128, 0x08, 0x0F),
)
VALUES = {code.values: code for code in (INT8, FP8, INT4)}
QUANTISED = {code.format: code for code in VALUES.values()}  # by the names of the formats
