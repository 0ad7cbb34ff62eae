"""Speed-up over density, drawn from the committed results: ``python -m benchmarks.sparse.plot``.

Writes ``sparse.svg`` beside each ``sparse.json``, with a digest of the points in it. ``--check``
compares digests, for which it needs no matplotlib, and exits 1 where a drawing is stale.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from benchmarks.common import drawing
from benchmarks.sparse import summary

LABELS = {"ours": "kernlib, auto", "macko": "MACKO's format, kernlib's kernel"}
COLORS = {"ours": drawing.BLUE, "macko": drawing.ORANGE}
TICKS = (0.5, 1, 2, 4, 8, 16)

# By name: density, and cuBLAS's time over the contender's as geometric mean, least and most.
Points = dict[str, list[tuple[float, float, float, float]]]


def points(rows: list[dict]) -> Points:
    """What is drawn of the rows of a result file: all shapes, one float16 vector."""
    found: Points = {"ours": [], "macko": []}
    for density, group in summary.grid(rows).items():
        if group.over["cublas"] is not None:
            found["ours"].append((density, *group.over["cublas"]))
    for density, group in summary.grid([turned for row in rows if (turned := _macko(row))]).items():
        found["macko"].append((density, *group.over["cublas"]))
    return {name: sorted(line) for name, line in found.items() if line}


def _macko(row: dict) -> dict | None:
    """The row as it would be if MACKO's format had been chosen."""
    if "macko" not in row["rivals"] or "cublas" not in row["rivals"]:
        return None
    return {**row, "ours": row["rivals"]["macko"]}


def draw(results: dict, path: Path) -> None:
    """Write the drawing of a result file. Raises ImportError without matplotlib."""
    found = points(results["rows"])
    with drawing.figure(path, found, (7, 4)) as axes:
        for name, line in found.items():
            density, mean, least, most = zip(*line, strict=True)
            axes.plot(density, mean, "o-", color=COLORS[name], label=LABELS[name], markersize=4)
            axes.fill_between(density, least, most, color=COLORS[name], alpha=0.15, linewidth=0)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        drawing.in_times(axes.yaxis, TICKS)
        axes.set_xlim(0, 1)
        axes.set_xlabel("density: the part of the entries that is not zero")
        axes.set_ylabel("cuBLAS's time over the contender's")
        axes.set_title(f"W x, float16, {_shapes(results['rows'])} matrices, {results['gpu']}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)


def _shapes(rows: list[dict]) -> int:
    return len({at.shape for at in summary.placed(rows, columns=1, kind="fp16")})


def main(argv=None, folder: Path = drawing.RESULTS) -> int:
    """Draw, or check. Returns the exit status."""
    found = [(path, json.loads(path.read_text())) for path in sorted(folder.glob("*/sparse.json"))]
    drawings = [
        (path.with_suffix(".svg"), points(results["rows"]), partial(draw, results))
        for path, results in found
    ]
    return drawing.main(argv, "benchmarks.sparse.plot", drawings)


if __name__ == "__main__":
    sys.exit(main())
