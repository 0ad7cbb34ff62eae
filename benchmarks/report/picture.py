"""README's picture: each family's cases beside their best rivals, ``python -m
benchmarks.report.picture``.

Writes ``families.svg`` beside the result files of each GPU; ``--check`` exits 1 where it is stale.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import drawing
from benchmarks.common.summary import geometric_mean, speed_up
from benchmarks.report import tables, verdict

NAME = "families.svg"
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
SPREAD = 0.28  # of a line's dots across it

# By family: how many times longer the best rival takes, in each case that has one.
Points = dict[str, list[float]]


def points(folder: Path) -> Points:
    """What is drawn of a GPU's result files."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        rows = verdict.compared(json.loads(path.read_text())["rows"])
        if rows and path.stem not in verdict.ASIDE:
            found[path.stem] = sorted(float(f"{speed_up(row):.4g}") for row in rows)
    return found


def draw(found: Points, gpu: str, path: Path) -> None:
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
        axes.set_yticks(range(len(found)), [_label(*item) for item in found.items()])
        axes.invert_yaxis()
        axes.set_xlabel("the best rival's time over kernlib's: a dot a case, a bar their mean")
        axes.set_title(gpu, fontsize=10)
        axes.grid(axis="x", alpha=0.3)


def _label(family: str, values: list[float]) -> str:
    return f"{tables.title(family)} ({len(values)})"


def drawings(folder: Path) -> list[drawing.Drawing]:
    made = []
    for home in sorted({path.parent for path in folder.glob("*/*.json")}):
        found = points(home)
        gpu = json.loads(next(iter(sorted(home.glob("*.json")))).read_text())["gpu"]
        if found:
            made.append((home / NAME, found, partial(draw, found, gpu)))
    return made


def main(argv=None, folder: Path = drawing.RESULTS) -> int:
    """Draw, or check. Returns the exit status."""
    return drawing.main(argv, "benchmarks.report.picture", drawings(folder))


if __name__ == "__main__":
    sys.exit(main())
