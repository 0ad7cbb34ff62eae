"""How the terms of long sums are divided among blocks, each of which leaves partial results."""

from __future__ import annotations

from kernlib.lowering.arithmetic import ceil_div
from kernlib.records import NamedTuple

MAX_SPLITS = 512
MAX_PLACES = 1 << 30  # terms of a block, which an int counts
WORKSPACE_BYTES = 64 << 20  # of partial results


class Sums(NamedTuple):
    """What :func:`split` divides: n terms each of a count of sums in each batch entry, which have
    so many bytes."""

    n: int
    count: int
    batch: int
    bytes: int = 4

    @property
    def most(self) -> int:
        """Parts whose partial results fit the workspace, and the kernels that join them."""
        fit = WORKSPACE_BYTES // (self.count * self.batch * self.bytes)
        return max(1, min(MAX_SPLITS, fit))


def split(
    sums: Sums, row_blocks: int, unit: int, slots: int, least: int = 1, start: float = 1
) -> int:
    """The n of a block, a multiple of ``unit``: of the numbers of splits, ``least`` or more, the
    one whose blocks, in waves of ``slots``, are done first, where starting a block takes as long as
    ``start`` units."""
    units = ceil_div(sums.n, unit)
    most = min(units, sums.most)
    least = max(min(least, most), ceil_div(units * unit, MAX_PLACES))

    def duration(splits: int) -> float:
        waves = ceil_div(row_blocks * splits * sums.batch, slots)
        return waves * (ceil_div(units, splits) + start)

    best = min(range(least, max(least, most) + 1), key=duration)
    return ceil_div(units, best) * unit
