"""README's table of results, from the committed result files; no number is written by hand.

``python -m benchmarks.report`` writes it, ``--check`` exits 1 where it is stale.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from benchmarks.harness import number

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results committed yet."
HEADER = ("case", "kernlib", "floor", "rivals", "error")


class MissingMarkers(Exception):
    """The README has no place for the table."""


def load(folder: Path) -> list[tuple[str, dict]]:
    """(family, results) of every file below ``folder``, in order of path."""
    return [(path.stem, json.loads(path.read_text())) for path in sorted(folder.glob("*/*.json"))]


def render(results: list[tuple[str, dict]]) -> str:
    """What belongs between the markers."""
    if not results:
        return NOTHING
    return "\n\n".join(_section(family, found) for family, found in results)


def _section(family: str, found: dict) -> str:
    head = (
        f"**{family.replace('_', ' ').capitalize()}** on {found['gpu']}, driver {found['driver']}, "
        f"torch {found['torch']}, NVRTC {found['nvrtc']}, {found['date']}"
    )
    lines = [_line(HEADER), "|---|---:|---:|---|---:|", *map(_row, found["rows"])]
    return "\n".join([head, "", *lines])


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(row: dict) -> str:
    unit = row["unit"]
    floor = f"{quantity(row['floor'], unit)} ({row['bound']})" if row["floor"] else ""
    rivals = ", ".join(_rival(name, row) for name in row["rivals"])
    return _line((row["case"], quantity(row["ours"], unit), floor, rivals, _error(row["error"])))


def _rival(name: str, row: dict) -> str:
    value = row["rivals"][name]
    error = row["rival_errors"].get(name)
    behind = f", error {_error(error)}" if error is not None else ""
    return f"{name} {quantity(value, row['unit'])} ({number(value / row['ours'], 2)}×{behind})"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


def quantity(value: float, unit: str) -> str:
    """A value with its unit, bytes in KB, MB or GB."""
    if unit == "count":
        return f"{value:g}"
    if unit == "bytes":
        power = min(3, max(1, int(math.log(max(value, 1), 1024))))
        return f"{number(value / 1024**power)} {' KMG'[power]}B"
    return f"{number(value)} {'µs' if unit == 'us' else unit}"


def replace(text: str, table: str) -> str:
    """``text`` with the table between its markers. Raises MissingMarkers."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise MissingMarkers(f"no {BEGIN} ... {END} in it: put both, in this order, on own lines")
    return f"{text[: begin + len(BEGIN)]}\n{table}\n{text[end:]}"


def main(argv=None, readme: Path | None = None, folder: Path | None = None) -> int:
    """Write the table, or check it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report")
    parser.add_argument("--check", action="store_true", help="exit 1 if the README is stale")
    options = parser.parse_args(argv)
    readme = readme or ROOT / "README.md"
    text = readme.read_text()
    try:
        wanted = replace(text, render(load(folder or ROOT / "benchmarks" / "results")))
    except MissingMarkers as error:
        print(f"{readme}: {error}", file=sys.stderr)
        return 1
    if options.check and wanted != text:
        print(f"{readme} is stale: run python -m benchmarks.report", file=sys.stderr)
        return 1
    if not options.check:
        readme.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
