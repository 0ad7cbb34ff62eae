"""What many rows of a benchmark say together: counts and means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

TIE = 1.05  # times within it count as equal
# Times that tables show beside kernlib's and no count compares: its kernel for a format of others;
# what tells how fast the host is; a step of kernlib with its gradient given; the first call of what
# a first use loads too.
BESIDE = ("macko", "add_", "given", "cholesky")


class Summary(NamedTuple):
    """Of ``cases`` rows, ``compared`` of them with a rival: in how many kernlib is the fastest, and
    how many times longer the best rival takes, as a geometric mean and at least; the geometric mean
    of time over floor; the largest error. None where no row has it."""

    cases: int
    compared: int
    wins: int
    speed_up: float | None
    least: float | None
    over_floor: float | None
    error: float | None


def summarise(rows: Sequence[dict]) -> Summary:
    """The summary of some rows of a result file."""
    ratios = [speed_up(row) for row in rows if others(row["rivals"])]
    floors = [row["ours"] / row["floor"] for row in rows if row["floor"]]
    errors = [row["error"] for row in rows if row["error"] is not None]
    return Summary(
        cases=len(rows),
        compared=len(ratios),
        wins=sum(ratio > 1 for ratio in ratios),
        speed_up=geometric_mean(ratios),
        least=min(ratios, default=None),
        over_floor=geometric_mean(floors),
        error=max(errors, default=None),
    )


def others(rivals: dict[str, float]) -> dict[str, float]:
    """Those that are compared."""
    return {name: time for name, time in rivals.items() if name not in BESIDE}


def speed_up(row: dict) -> float:
    """How many times longer the best rival takes."""
    return min(others(row["rivals"]).values()) / row["ours"]


def best_rival(row: dict) -> str:
    """Its name."""
    found = others(row["rivals"])
    return min(found, key=found.__getitem__)


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None
