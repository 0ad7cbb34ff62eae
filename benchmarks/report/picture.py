"""README's picture: each family's cases beside their best rivals, ``python -m
benchmarks.report.picture``.

Writes ``families.svg`` beside the folders of results; ``--check`` exits 1 where it is stale.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import drawing
from benchmarks.common.summary import geometric_mean, speed_up
from benchmarks.report import load, tables, verdict

NAME = "families.svg"
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
SPREAD = 0.28  # of a line's dots across it

# By family and GPU: how many times longer the best rival takes, in each case that has one.
Points = dict[str, list[float]]


def points(results: list[tuple[str, dict]]) -> Points:
    """What is drawn of result files."""
    found = {}
    for family, each in verdict.measured(results):
        label = f"{tables.title(family)}, {tables.short(each['gpu'])}"
        rows = verdict.compared(each["rows"])
        found[label] = sorted(float(f"{speed_up(row):.4g}") for row in rows)
    return dict(sorted(found.items()))


def draw(found: Points, path: Path) -> None:
    """Write the picture: a dot a case, a bar at the geometric mean."""
    draws = random.Random(0)  # the same bytes each time
    with drawing.figure(path, found, (8, 0.7 + 0.55 * len(found))) as axes:
        for line, values in enumerate(found.values()):
            across = [line + draws.uniform(-SPREAD, SPREAD) for _ in values]
            axes.plot(values, across, ".", color=drawing.BLUE, alpha=0.35, markersize=5)
            mean = [geometric_mean(values)] * 2
            axes.plot(mean, [line - 0.4, line + 0.4], color=drawing.ORANGE, linewidth=2.5)
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        drawing.in_times(axes.xaxis, TICKS)
        labels = [f"{name} ({len(values)})" for name, values in found.items()]
        axes.set_yticks(range(len(found)), labels)
        axes.invert_yaxis()
        axes.set_xlabel(
            "the best rival's time over kernlib's: a dot a case, a bar their geometric mean"
        )
        axes.grid(axis="x", alpha=0.3)


def drawings(folder: Path) -> list[drawing.Drawing]:
    found = points(load(folder))
    return [(folder / NAME, found, partial(draw, found))] if found else []


def main(argv=None, folder: Path = drawing.RESULTS) -> int:
    """Draw, or check. Returns the exit status."""
    return drawing.main(argv, "benchmarks.report.picture", drawings(folder))


if __name__ == "__main__":
    sys.exit(main())
