"""The size of a tile by how often multiprocessors take one."""

from __future__ import annotations

from collections.abc import Callable

from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice


def fewest_rounds(
    candidates: list[Choice], tiles: Callable[[Choice], tuple[int, int]], multiprocessors: int
) -> Choice:
    """The candidate whose tiles take a multiprocessor least: in as many rounds as their number
    makes, each of what ``tiles(candidate)`` says beside it that one costs; of equals the first."""

    def cost(candidate: Choice) -> int:
        count, each = tiles(candidate)
        return ceil_div(count, multiprocessors) * each

    return min(candidates, key=cost)
