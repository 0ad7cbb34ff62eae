"""Drawings of results: each holds a digest of what it shows, so that a stale one is found without
matplotlib."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"
BLUE, ORANGE = "#0072b2", "#d55e00"  # told apart by colour-blind readers

# Path of a drawing, what it shows as JSON would have it, and what draws that to the path.
Drawing = tuple[Path, object, Callable[[Path], None]]


def digest(points: object) -> str:
    return hashlib.sha256(json.dumps(points, sort_keys=True).encode()).hexdigest()


@contextmanager
def figure(path: Path, points: object, size: tuple[float, float]):
    """Axes of a figure that is written to the path, the same bytes each time. Raises ImportError
    without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": path.stem, "font.size": 10}):
        made, axes = pyplot.subplots(figsize=size, layout="constrained")
        yield axes
        made.savefig(path, metadata={"Description": digest(points), "Date": None})
        pyplot.close(made)


def in_times(axis, ticks: Iterable[float]) -> None:
    """A logarithmic axis of so many times."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))


def is_current(path: Path, points: object) -> bool:
    """Whether a drawing is there and of these points."""
    if not path.exists():
        return False
    written = re.search(r"<dc:description>\s*(\w+)\s*</dc:description>", path.read_text())
    return written is not None and written[1] == digest(points)


def main(argv, module: str, drawings: Iterable[Drawing]) -> int:
    """Draw, or check. Returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--check", action="store_true", help="exit 1 if a drawing is stale")
    options, status = parser.parse_args(argv), 0
    for path, points, draw in drawings:
        if not options.check:
            draw(path)
        elif not is_current(path, points):
            print(f"{path} is stale: run python -m {module}", file=sys.stderr)
            status = 1
    return status
