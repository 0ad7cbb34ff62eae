"""What many rows of the sparse benchmark say together, in lines for the terminal and in the few
rows that its page has room for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.common.harness import number
from benchmarks.common.summary import geometric_mean
from benchmarks.sparse.problems import DENSITIES, HEADLINE, OVER_HALF, SHAPES, SHOWN_DENSITIES

CASE = re.compile(r"spmv (\d+)x(\d+) density=([\d.]+) (\w+) (?:N=(\d+) )?(\w+?)( frozen)?$")
RIVALS = ("cublas", "macko")
HEADER = ("matrix, fp16", *(f"density {density:g}" for density in SHOWN_DENSITIES))
GRID = (
    "density, 31 shapes", "format", "cuBLAS, geometric mean", "least",
    "MACKO's format, geometric mean", "least", "over floor, geometric mean", "largest error",
)  # fmt: skip
OTHERS = ("case", "kernlib", "floor", "cuBLAS", "error")


class Place(NamedTuple):
    """What a case's name says."""

    rows: int
    cols: int
    density: float
    format: str
    columns: int
    kind: str
    frozen: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.cols


class Group(NamedTuple):
    """Of the rows at one density: how often each format was chosen; how many times longer each of
    RIVALS takes, as a geometric mean, at least and at most, None where it was not measured; time
    over floor, as a geometric mean; the largest error."""

    cases: int
    formats: dict[str, int]
    over: dict[str, tuple[float, float, float] | None]
    over_floor: float
    error: float


def place(case: str) -> Place | None:
    """What the name of a product says, None for other cases."""
    found = CASE.match(case)
    if found is None:
        return None
    rows, cols, density, format, columns, kind, frozen = found.groups()
    sizes = int(rows), int(cols), float(density)
    return Place(*sizes, format, int(columns or 1), kind, frozen is not None)


def format_of(row: dict) -> str:
    """The format that a matrix was compressed to."""
    return row["bound"].split(", ")[-1]


def over(row: dict, rival: str) -> float | None:
    """How many times longer a rival takes."""
    return row["rivals"][rival] / row["ours"] if rival in row["rivals"] else None


def placed(rows: Iterable[dict], **wanted) -> dict[Place, dict]:
    """The rows of products with compressed matrices of a chosen format, where what their names say
    is ``wanted``; of frozen ones only if that is."""
    found, wanted = {}, {"frozen": False, **wanted}
    for row in rows:
        at = place(row["case"])
        if at and at.format == "auto" and all(getattr(at, k) == v for k, v in wanted.items()):
            found[at] = row
    return found


def grid(rows: Iterable[dict]) -> dict[float, Group]:
    """The products with one float16 vector, by density, the densest first."""
    by_density: dict[float, list[dict]] = {}
    for at, row in placed(rows, columns=1, kind="fp16").items():
        if at.shape in SHAPES:
            by_density.setdefault(at.density, []).append(row)
    return {d: group(by_density[d]) for d in DENSITIES if d in by_density}


def group(rows: Sequence[dict]) -> Group:
    return Group(
        cases=len(rows),
        formats=dict(Counter(map(format_of, rows)).most_common()),
        over={rival: _spread([over(row, rival) for row in rows]) for rival in RIVALS},
        over_floor=geometric_mean([row["ours"] / row["floor"] for row in rows]),
        error=max(row["error"] for row in rows),
    )


def _spread(ratios: Sequence[float | None]) -> tuple[float, float, float] | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return (geometric_mean(known), min(known), max(known)) if known else None


# For the terminal.


def line(row: dict) -> str:
    """One row, briefly."""
    text = f"{row['case']}: {number(row['ours'])} {row['unit']}"
    if row["floor"]:
        text += f", {number(row['ours'] / row['floor'])} x floor ({format_of(row)})"
    for rival, value in row["rivals"].items():
        text += f", {rival} {number(value)} ({number(value / row['ours'])} x)"
    if row.get("must") is not None and row["ours"] > row["must"]:
        text += f", MISSED {number(row['must'])}"
    return text


def lines(rows: Sequence[dict]) -> list[str]:
    """A line for each density."""
    return [
        f"density {density:g}: {found.cases} cases, {_formats(found)}, cublas "
        f"{_times(found.over['cublas'])} x, macko {_times(found.over['macko'])} x, "
        f"{number(found.over_floor)} x floor, error {found.error:.1e}"
        for density, found in grid(rows).items()
    ]


def _times(spread: tuple[float, float, float] | None) -> str:
    return "" if spread is None else f"{number(spread[0])} ({number(spread[1])} at least)"


def _formats(found: Group) -> str:
    if len(found.formats) == 1:
        return next(iter(found.formats))
    return ", ".join(f"{name} {count}" for name, count in found.formats.items())


# For its page: tables, each of a header, a rule and the cells of its lines.

Table = tuple[tuple[str, ...], str, list[tuple[str, ...]]]


def tables(rows: Sequence[dict]) -> list[Table]:
    """The headline shapes by density, for one vector, of frozen matrices too, and for eight; the
    grid, a line a density;
    bfloat16, values in fewer bits and compression, row by row."""
    found = []
    headline = [*_headline(rows, 1), *_headline(rows, 1, frozen=True), *_headline(rows, 8)]
    if headline:
        found.append((HEADER, "|---|" + "---:|" * len(SHOWN_DENSITIES), headline))
    densities = [_density(*item) for item in grid(rows).items()]
    if densities:
        found.append((GRID, "|---|---|" + "---:|" * (len(GRID) - 2), densities))
    others = [_other(row) for row in rows if _is_other(row)]
    if others:
        found.append((OTHERS, "|---|" + "---:|" * (len(OTHERS) - 1), others))
    return found


def _headline(rows: Sequence[dict], columns: int, frozen: bool = False) -> list[tuple[str, ...]]:
    known = placed(rows, columns=columns, kind="fp16", frozen=frozen)
    found = {at[:3]: row for at, row in known.items()}
    several = f", {columns} vectors" if columns > 1 else ""
    several += ", frozen" if frozen else ""
    return [
        (
            f"{shape[0]}x{shape[1]}{several}",
            *(_cell(found.get((*shape, density))) for density in SHOWN_DENSITIES),
        )
        for shape in HEADLINE
        if any((*shape, density) in found for density in SHOWN_DENSITIES)
    ]


def _cell(row: dict | None) -> str:
    """Time, and how many times longer cuBLAS takes."""
    if row is None:
        return ""
    ratio = over(row, "cublas")
    return f"{number(row['ours'])} µs" + (f" ({number(ratio)}×)" if ratio is not None else "")


def _density(density: float, found: Group) -> tuple[str, ...]:
    cells = [f"{density:g}", _formats(found)]
    for rival in RIVALS:
        spread = found.over[rival]
        cells += ["", ""] if spread is None else [f"{number(n)}×" for n in spread[:2]]
    return (*cells, f"{number(found.over_floor)}×", f"{found.error:.1e}")


def _is_other(row: dict) -> bool:
    at = place(row["case"])
    if at is None:
        return True
    if at.format in OVER_HALF:
        return True
    return at.format == "auto" and not at.frozen and (at.kind != "fp16" or at.columns not in (1, 8))


def _other(row: dict) -> tuple[str, ...]:
    unit = "µs" if row["unit"] == "us" else row["unit"]
    beside, ratio = row["rivals"].get("cublas"), over(row, "cublas")
    return (
        row["case"],
        f"{number(row['ours'])} {unit}",
        f"{number(row['floor'])} {unit} ({row['bound']})" if row["floor"] else "",
        f"{number(beside)} {unit} ({number(ratio)}×)" if beside is not None else "",
        f"{row['error']:.1e}" if row["error"] is not None else "",
    )
