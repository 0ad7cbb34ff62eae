"""The tables of a family's results."""

from __future__ import annotations

import math

from benchmarks.common.harness import number
from benchmarks.common.summary import TIE, Summary, best_rival, others, speed_up, summarise
from benchmarks.kronecker_product import summary as kronecker_product
from benchmarks.kronecker_sparse import summary as kronecker_sparse
from benchmarks.sparse import summary as sparse

HEADER = ("case", "kernlib", "floor", "rivals", "error")
TITLES = {
    "auto": "What kernlib chooses by itself",
    "blocksparse": "Block-sparse",
    "cpu": "CPU tensors",
    "kronecker_sparse": "Kronecker-sparse",
}
# How many times longer the best rival takes.
SUMMARIES = (
    "cases", "fastest in", "best rival, geometric mean", "best rival, least",
    "over floor, geometric mean", "largest error",
)  # fmt: skip


def section(family: str, found: dict) -> str:
    """Of one result file: where and when it was measured, and its tables."""
    host = f", host {found['host']}" if "host" in found else ""
    head = (
        f"**{title(family)}** on {found['gpu']}{host}, driver {found['driver']}, "
        f"torch {found['torch']}, NVRTC {found['nvrtc']}, {found['date']}"
    )
    return "\n\n".join([head, *TABLES.get(family, _rows)(found["rows"])])


def title(family: str) -> str:
    """A family's name in words."""
    return TITLES.get(family, family.replace("_", " ").capitalize())


def short(gpu: str) -> str:
    """H100 of NVIDIA H100 80GB HBM3."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def _rows(rows: list[dict]) -> list[str]:
    """One table of all rows."""
    return [table(HEADER, "|---|---:|---:|---|---:|", map(_row, rows))]


def table(header, rule: str, lines) -> str:
    return "\n".join([line(header), rule, *lines])


def line(cells) -> str:
    return "| " + " | ".join(cells) + " |"


def _row(row: dict) -> str:
    rivals = ", ".join(_rival(name, row) for name in row["rivals"])
    ours = quantity(row["ours"], row["unit"])
    return line((row["case"], ours, _floor(row), rivals, _error(row["error"])))


def _floor(row: dict) -> str:
    return f"{quantity(row['floor'], row['unit'])} ({row['bound']})" if row["floor"] else ""


def _rival(name: str, row: dict) -> str:
    value = row["rivals"][name]
    error = row["rival_errors"].get(name)
    behind = f", error {_error(error)}" if error is not None else ""
    return f"{name} {quantity(value, row['unit'])} ({number(value / row['ours'], 2)}×{behind})"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


# Families with more rows than a reader has patience for.


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
    tables = [table(header, "|---|" + "---:|---:|---|---:|" * len(shown), factors)] * bool(factors)
    if summaries:
        tables.append(table(SUMMARIES, "|---|" + "---:|" * (len(SUMMARIES) - 1), summaries))
    others = family.others(rows)
    return [*tables, *(_rows(others) if others else [])]


def _factor(name: str, kinds: dict[str, dict], shown: tuple[str, ...]) -> str:
    cells = [name]
    for kind in shown:
        cells += _cells(kinds[kind]) if kind in kinds else [""] * 4
    return line(cells)


def _cells(row: dict) -> list[str]:
    has_rival = bool(others(row["rivals"]))
    best = _rival(best_rival(row), {**row, "rival_errors": {}}) if has_rival else ""
    return [quantity(row["ours"], row["unit"]), _floor(row), best, _error(row["error"])]


def _summary(name: str, found: Summary) -> str:
    wins = f"{found.wins} of {found.compared}" if found.compared else ""
    times = (_times(found.speed_up), _times(found.least), _times(found.over_floor))
    return line((f"{name}: {found.cases}", wins, *times, _error(found.error)))


def _times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}×"


def _sparse(rows: list[dict]) -> list[str]:
    """The headline shapes, the grid by density, all other rows."""
    return [table(header, rule, map(line, lines)) for header, rule, lines in sparse.tables(rows)]


def _auto(rows: list[dict]) -> list[str]:
    """A line a family, of random calls for which kernlib chooses the kernel."""
    header = (
        "family",
        "calls",
        "within 5 % of the fastest way",
        "it takes, geometric mean",
        "least",
    )
    families: dict[str, list[dict]] = {}
    for row in rows:
        families.setdefault(row["case"].split()[1], []).append(row)
    lines = [line((title(name), *_chosen(some))) for name, some in families.items()]
    return [table(header, "|---|" + "---:|" * 4, lines)]


def _chosen(rows: list[dict]) -> list[str]:
    """How often and by how much another way than the chosen one is faster."""
    found, met = summarise(rows), sum(speed_up(row) * TIE >= 1 for row in rows)
    return [str(len(rows)), str(met), _times(found.speed_up), _times(found.least)]


TABLES = {
    "auto": _auto,
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
