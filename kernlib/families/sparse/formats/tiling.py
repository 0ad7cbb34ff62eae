"""How the formats u8, u4 and u2 divide the columns of a matrix among warps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kernlib.families.sparse.lowering.codes import LANES, MOST_PARTS, WIDEST, WIDEST_IN_PARTS
from kernlib.lowering.arithmetic import ceil_div, round_up

# Default widths, of 2-byte values: 8 copies of 8 vectors' x fill Hopper's shared memory at 1792.
LEAST_WIDTH, MOST_WIDTH = 512, 1792
MULTIPROCESSORS, WARPS = 132, 32  # of an H200, and of each that are at work at a time
WAVE = MULTIPROCESSORS * WARPS  # slices that it takes at a time, one a warp
SLICE_COST = 64  # columns that one takes as long as, without codes
FEW_COLUMNS = 2  # vectors up to which a product gathers x as it is, and not from copies
# Times in columns that a warp goes through, of about 12 clocks each where there are codes. So long
# takes a second launch. A multiprocessor with several warps at work goes through BUSY in that time,
# and stages STAGED of x. Memory brings MEMORY of one lane of 32 for all of the GPU, and to one
# multiprocessor up to SHARE times its part of them, where others are idle.
LAUNCH, BUSY, STAGED, MEMORY, SHARE = 1000, 5, 20, 305, 1.3
LEAST_CODES = 80  # of a part: one more costs each warp its first loads, and a sum
MORE_CODES = 1.15  # up to so many times the codes of panels, rows cut into parts are faster
# Up to so many vectors, and codes of a row, rows are cut all the same where each multiprocessor has
# SLICES: on an H200 u8 of density 0.1 by 4 vectors takes 9.7 us for 12288 x 4096 and 15.5 for
# 22016 x 4096, in panels 13.6 and 18.6; of 4096 x 4096, in fewer slices, 8.1 and 5.6.
SOME_COLUMNS, SOME_CODES, SLICES = 4, 450, 2


class Tiling(NamedTuple):
    """Panels are of ``width`` columns, a multiple of 16. Each row of a panel is cut into ``parts``
    of as many codes each. There is one panel if there are several parts."""

    width: int
    parts: int = 1

    @property
    def facts(self) -> dict[str, int]:
        """The facts of a matrix that is laid out so. Files of before have no ``parts``."""
        return self._asdict()

    @classmethod
    def of(cls, facts: Mapping[str, int]) -> Tiling:
        """The tiling that facts say."""
        return cls(facts.get("width", 0), facts.get("parts", 1))

    def check(self, cols: int, itemsize: int) -> None:
        """Raises ValueError for what is no tiling of a matrix of so many columns."""
        width, parts = self
        most = WIDEST // itemsize
        if parts == 1 and (width < 16 or width % 16 or width > most):
            raise ValueError(f"fact width must be a multiple of 16 up to {most}, got {width}")
        if parts == 1:
            return
        if not 2 <= parts <= MOST_PARTS:
            raise ValueError(f"fact parts must be from 1 to {MOST_PARTS}, got {parts}")
        most = WIDEST_IN_PARTS // itemsize
        if width != round_up(max(cols, 1), 16) or width > most:
            raise ValueError(
                f"fact width must be {round_up(max(cols, 1), 16)}, all columns, where rows are cut "
                f"into parts, and {most} at the most, got {width}"
            )


def tiling_of(
    shape: tuple[int, int], itemsize: int, columns: int = 1, most: int = MOST_PARTS
) -> Tiling:
    """The tiling by which products of a matrix with so many vectors should be fastest: rows cut
    into parts, ``most`` at the most, whose sums meet in one block, unless multiprocessors cannot
    share them evenly, or x is too large for shared memory or takes longer to get there than a
    second launch, or too many vectors gather from it."""
    rows, cols = shape
    panels = Tiling(panel_width(rows, cols, itemsize))
    width = round_up(max(cols, 1), 16)
    if columns > FEW_COLUMNS or width * itemsize > WIDEST_IN_PARTS or panels.width >= width:
        return panels
    slices = ceil_div(rows, LANES)
    most = max(2, min(most, cols // LEAST_WIDTH))
    times = {parts: _lane_time(slices, cols, parts) for parts in _part_counts(most)}
    parts = min(times, key=lambda parts: (times[parts], parts))
    bound = slices * cols / MEMORY
    # Multiprocessors keep the slices that they begin with, and those with one more end last.
    busiest = ceil_div(slices, MULTIPROCESSORS)
    of_memory = max(bound, busiest * MULTIPROCESSORS * cols / MEMORY / SHARE)
    of_parts = max(of_memory, busiest * cols / BUSY, times[parts]) + cols / STAGED
    waves = ceil_div(slices * ceil_div(cols, panels.width), WAVE)
    of_panels = max(bound, waves * (panels.width + SLICE_COST)) + LAUNCH
    return Tiling(width, parts) if of_parts <= of_panels else panels


def best_tiling(
    shape: tuple[int, int], itemsize: int, columns: int, codes: Callable[[Tiling], int]
) -> Tiling:
    """:func:`tiling_of`'s, by the codes that a matrix needs: where entries lie close together,
    those that lead to the first one of a row are many, and panels without entries need none."""
    tiling = tiling_of(shape, itemsize, columns)
    is_spread = ceil_div(shape[0], LANES) >= SLICES * MULTIPROCESSORS
    if FEW_COLUMNS < columns <= SOME_COLUMNS and is_spread:
        cut = best_tiling(shape, itemsize, 1, codes)
        if cut.parts > 1 and codes(cut) <= SOME_CODES * shape[0]:
            return cut
    if tiling.parts == 1:
        return tiling
    panels, total = Tiling(panel_width(*shape, itemsize)), codes(tiling)
    if total > MORE_CODES * codes(panels):
        return panels
    most = max(2, total // (LEAST_CODES * max(1, shape[0])))
    return tiling if tiling.parts <= most else tiling_of(shape, itemsize, columns, most)


def _part_counts(most: int) -> list[int]:
    """Numbers of parts by which few warps of a block of 8, 16 or 32 are idle."""
    return [n for n in (2, 3, 4, 5, 6, 7, 8, 16, 32) if n <= most]


def _lane_time(slices: int, cols: int, parts: int) -> int:
    """Columns that one warp goes through after the other."""
    at_a_time = MULTIPROCESSORS * (WARPS // parts)
    return ceil_div(slices, at_a_time) * (ceil_div(cols, parts) + SLICE_COST)


def panel_width(rows: int, cols: int, itemsize: int) -> int:
    """Columns of a panel, a multiple of 16: of all numbers of panels the one whose slices, taken a
    WAVE at a time, should be done first."""
    slices, cols, most = ceil_div(rows, LANES), max(cols, 1), MOST_WIDTH * 2 // itemsize
    fewest = ceil_div(cols, most)
    largest = max(fewest, cols // LEAST_WIDTH)
    # By their widths, of which there are few: the fewest panels of each.
    widths = range(ceil_div(cols, 16 * largest), ceil_div(cols, 16 * fewest) + 1)
    panels = {ceil_div(cols, 16 * width) for width in widths}

    def cost(width: int) -> tuple[int, int]:
        waves = ceil_div(slices * ceil_div(cols, width), WAVE)
        return waves * (width + SLICE_COST), -width

    return min((-(-cols // (16 * n)) * 16 for n in panels), key=cost)
