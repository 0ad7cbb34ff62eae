"""How an operand of pairwise kernels lies in memory, and how far loads of it can run."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.lowering.dtypes import DTYPES


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
