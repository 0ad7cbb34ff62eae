"""README's pictures: the cases of each family beside each rival by name, a picture a GPU, ``python
-m benchmarks.report.picture``.

Writes ``families.svg`` into each folder of results; ``--check`` exits 1 where one is stale.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import drawing
from benchmarks.common.summary import geometric_mean, others
from benchmarks.report import load, tables, verdict

NAME = "families.svg"
TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 256)
SPREAD = 0.28  # of a line's dots across it
FEWEST = 10  # cases of a rival that has a line
RIVALS = {
    "addmm": "torch.addmm",
    "blksprs": "blksprs",
    "bmm": "torch.bmm",
    "cublas": "cuBLAS, dense",
    "cublas bf16": "cuBLAS, dense bfloat16",
    "cublas fp8": "cuBLAS, dense float8",
    "cudnn, all of the matrix": "cuDNN, dense attention",
    "dense": "cuBLAS, dense",
    "einsum": "torch.einsum",
    "keops": "KeOps",
    "merged to 16": "torch, factors merged to 16",
    "merged to 64": "torch, factors merged to 64",
    "shuffle": "torch, shuffle algorithm",
    "strided": "torch.bmm, strided views",
}

# By family and rival: how many times longer the rival takes, in each case that has it.
Points = dict[str, list[float]]


def points(results: list[tuple[str, dict]]) -> Points:
    """What is drawn of the result files of one GPU."""
    times: Points = {}
    for family, each in verdict.measured(results):
        for row in verdict.compared(each["rows"]):
            for rival, time in others(row["rivals"]).items():
                label = f"{tables.title(family)} / {RIVALS.get(rival, rival)}"
                times.setdefault(label, []).append(float(f"{time / row['ours']:.4g}"))
    return {label: sorted(times[label]) for label in sorted(times) if len(times[label]) >= FEWEST}


def draw(times: Points, gpu: str, path: Path) -> None:
    """Write the picture: a dot a case, a bar at the geometric mean."""
    draws = random.Random(0)  # the same bytes each time
    with drawing.figure(path, times, (9.5, 1.3 + 0.34 * len(times))) as axes:
        for line, values in enumerate(times.values()):
            across = [line + draws.uniform(-SPREAD, SPREAD) for _ in values]
            axes.plot(values, across, ".", color=drawing.BLUE, alpha=0.35, markersize=4)
            mean = [geometric_mean(values)] * 2
            axes.plot(mean, [line - 0.4, line + 0.4], color=drawing.ORANGE, linewidth=2.5)
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        drawing.in_times(axes.xaxis, TICKS)
        labels = [f"{name} ({len(values)})" for name, values in times.items()]
        axes.set_yticks(range(len(times)), labels)
        axes.invert_yaxis()
        title = f"kernlib beside each rival on one {gpu}: a dot a case, a bar the mean"
        axes.figure.suptitle(title)
        axes.set_xlabel("the rival's time over kernlib's: right of 1× kernlib is faster")
        axes.set_ylabel("family / rival (cases)")
        axes.grid(axis="x", alpha=0.3)


def drawings(folder: Path) -> list[drawing.Drawing]:
    """Of each GPU below the folder of results that has something to draw."""
    pictures: list[drawing.Drawing] = []
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        results = load(folder, place.name)
        times = points(results)
        if times:
            gpu = next(tables.short(each["gpu"]) for _, each in verdict.measured(results))
            pictures.append((place / NAME, times, partial(draw, times, gpu)))
    return pictures


def main(argv=None, folder: Path = drawing.RESULTS) -> int:
    """Draw, or check. Returns the exit status."""
    return drawing.main(argv, "benchmarks.report.picture", drawings(folder))


if __name__ == "__main__":
    sys.exit(main())
