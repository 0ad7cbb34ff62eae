"""Speed-up over density, drawn from the committed results: ``python -m benchmarks.sparse.plot``.

Writes ``sparse.svg`` beside each ``sparse.json``, with a digest of the points in it. ``--check``
compares digests, for which it needs no matplotlib, and exits 1 where a drawing is stale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

from benchmarks.sparse import summary

RESULTS = Path(__file__).resolve().parents[1] / "results"
LABELS = {"ours": "kernlib, auto", "macko": "MACKO's format, kernlib's kernel"}
COLORS = {"ours": "#0072b2", "macko": "#d55e00"}  # told apart by colour-blind readers
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


def digest(found: Points) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def draw(results: dict, path: Path) -> None:
    """Write the drawing of a result file. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = points(results["rows"])
    with matplotlib.rc_context({"svg.hashsalt": "sparse", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        for name, line in found.items():
            density, mean, least, most = zip(*line, strict=True)
            axes.plot(density, mean, "o-", color=COLORS[name], label=LABELS[name], markersize=4)
            axes.fill_between(density, least, most, color=COLORS[name], alpha=0.15, linewidth=0)
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_xlim(0, 1)
        axes.set_xlabel("density: the part of the entries that is not zero")
        axes.set_ylabel("cuBLAS's time over the contender's")
        axes.set_title(f"W x, float16, {_shapes(results['rows'])} matrices, {results['gpu']}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Description": digest(found), "Date": None})
        pyplot.close(figure)


def _shapes(rows: list[dict]) -> int:
    return len({at.shape for at in summary.placed(rows, columns=1, kind="fp16")})


def is_current(results: dict, path: Path) -> bool:
    """Whether a drawing is there and of these results."""
    if not path.exists():
        return False
    written = re.search(r"<dc:description>\s*(\w+)\s*</dc:description>", path.read_text())
    return written is not None and written[1] == digest(points(results["rows"]))


def main(argv=None, folder: Path = RESULTS) -> int:
    """Draw, or check. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse.plot")
    parser.add_argument("--check", action="store_true", help="exit 1 if a drawing is stale")
    options = parser.parse_args(argv)
    status = 0
    for path in sorted(folder.glob("*/sparse.json")):
        results, drawing = json.loads(path.read_text()), path.with_suffix(".svg")
        if not options.check:
            draw(results, drawing)
        elif not is_current(results, drawing):
            print(f"{drawing} is stale: run python -m benchmarks.sparse.plot", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
