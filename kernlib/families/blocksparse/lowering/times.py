"""What a choice between kernels, between sizes of a tile or between ways to cut a product takes, by
rule: rounds of tiles, or microseconds.

Microseconds are fitted to what an H100 of 132 multiprocessors took for the random calls of
``python -m benchmarks.auto``, by each kernel with each number of parts, of layouts whose slots all
hold a block, anywhere. Only comparisons count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Choice

ADDING_UP = 1.0  # of the launch of parts.cuh behind another
BYTES = 3.6e6  # a microsecond, of results and of parts


def fewest_rounds(
    candidates: list[Choice], tiles: Callable[[Choice], tuple[int, int]], multiprocessors: int
) -> Choice:
    """The first of the candidates whose tiles take the least time: their number is rounded up to
    whole rounds on all multiprocessors, and each round takes what one tile does. ``tiles`` says of
    a candidate how many there are, and the time of one, in any unit."""

    def cost(candidate: Choice) -> int:
        count, time = tiles(candidate)
        return ceil_div(count, multiprocessors) * time

    return min(candidates, key=cost)


class Rate(NamedTuple):
    """Of a stage: where a block of threads has a multiprocessor for itself, what each further one
    there adds, and how many of them are faster than one after the other."""

    alone: float
    more: float
    resident: int


def stages(blocks: int, each: float, rate: Rate, multiprocessors: int) -> float:
    """Of so many blocks of threads with so many stages each."""
    together = min(ceil_div(blocks, multiprocessors), rate.resident)
    rounds = max(1.0, blocks / (multiprocessors * rate.resident))
    return each * rounds * (rate.alone + rate.more * (together - 1))


def adding_up(elements: int, parts: int) -> float:
    """What it takes to write and to read so many sums in parts, 0 for one part."""
    return ADDING_UP + 8 * elements * parts / BYTES if parts > 1 else 0.0


def filled(density: float, lines: int) -> float:
    """The part of the depth at which one of so many lines of blocks stores one."""
    return 1 - (1 - density) ** lines
