"""README's table of results, from the committed result files; no number is written by hand.

``python -m benchmarks.report`` writes it, ``--check`` exits 1 where it is stale.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from benchmarks.common.harness import number
from benchmarks.common.summary import Summary, best_rival
from benchmarks.kronecker_product import summary as kronecker_product
from benchmarks.kronecker_sparse import summary as kronecker_sparse
from benchmarks.sparse import summary as sparse

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
NOTHING = "No results committed yet."
HEADER = ("case", "kernlib", "floor", "rivals", "error")
# How many times longer the best rival takes; means are geometric.
SUMMARIES = (
    "cases", "fastest in", "best rival, mean", "best rival, least", "over floor, mean",
    "largest error",
)  # fmt: skip


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
    tables = TABLES.get(family, _rows)(found["rows"])
    return "\n\n".join([head, *tables])


def _rows(rows: list[dict]) -> list[str]:
    """One table of all rows."""
    return [_table(HEADER, "|---|---:|---:|---|---:|", map(_row, rows))]


def _table(header, rule: str, lines) -> str:
    return "\n".join([_line(header), rule, *lines])


def _line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(row: dict) -> str:
    rivals = ", ".join(_rival(name, row) for name in row["rivals"])
    ours = quantity(row["ours"], row["unit"])
    return _line((row["case"], ours, _floor(row), rivals, _error(row["error"])))


def _floor(row: dict) -> str:
    return f"{quantity(row['floor'], row['unit'])} ({row['bound']})" if row["floor"] else ""


def _rival(name: str, row: dict) -> str:
    value = row["rivals"][name]
    error = row["rival_errors"].get(name)
    behind = f", error {_error(error)}" if error is not None else ""
    return f"{name} {quantity(value, row['unit'])} ({number(value / row['ours'], 2)}×{behind})"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


# Families with more rows than README has room for.


def _kronecker_sparse(rows: list[dict]) -> list[str]:
    """The factors, a row for all SHOWN kinds; summaries of the other sections; all other rows."""
    return _of_factors("factor", kronecker_sparse, rows)


def _kronecker_product(rows: list[dict]) -> list[str]:
    """The named cases, a row for all SHOWN kinds; summaries of the other sections; the rest."""
    return _of_factors("rows of x, factors", kronecker_product, rows)


def _of_factors(title: str, family, rows: list[dict]) -> list[str]:
    """Of a family's summary what has tables of its own."""
    shown = family.SHOWN
    header = title, *(c for kind in shown for c in (kind, "floor", "best rival", "error"))
    factors = [_factor(*item, shown) for item in family.factors(rows).items()]
    summaries = [_summary(*item) for item in family.summaries(rows).items()]
    tables = [_table(header, "|---|" + "---:|---:|---|---:|" * len(shown), factors)] * bool(factors)
    if summaries:
        tables.append(_table(SUMMARIES, "|---|" + "---:|" * (len(SUMMARIES) - 1), summaries))
    others = family.others(rows)
    return [*tables, *(_rows(others) if others else [])]


def _factor(name: str, kinds: dict[str, dict], shown: tuple[str, ...]) -> str:
    cells = [name]
    for kind in shown:
        cells += _cells(kinds[kind]) if kind in kinds else [""] * 4
    return _line(cells)


def _cells(row: dict) -> list[str]:
    rivals = row["rivals"]
    best = _rival(best_rival(row), {**row, "rival_errors": {}}) if rivals else ""
    return [quantity(row["ours"], row["unit"]), _floor(row), best, _error(row["error"])]


def _summary(name: str, found: Summary) -> str:
    wins = f"{found.wins} of {found.compared}" if found.compared else ""
    times = (_times(found.speed_up), _times(found.least), _times(found.over_floor))
    return _line((f"{name}: {found.cases}", wins, *times, _error(found.error)))


def _times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}×"


def _sparse(rows: list[dict]) -> list[str]:
    """The headline shapes, the grid by density, all other rows."""
    return [_table(header, rule, map(_line, lines)) for header, rule, lines in sparse.tables(rows)]


TABLES = {
    "kronecker_product": _kronecker_product,
    "kronecker_sparse": _kronecker_sparse,
    "sparse": _sparse,
}


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
