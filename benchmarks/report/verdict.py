"""Where kernlib is the fastest and where a rival is: counts in README, a list on each page."""

from __future__ import annotations

from benchmarks.common.harness import PORTABLE, number
from benchmarks.common.summary import TIE, best_rival, others, speed_up, summarise
from benchmarks.report.tables import line, quantity, short, table, title

TIMES = ("ms", "us")
# No families: choices of all of them; calls without a GPU; several GPUs beside one; steps of
# programs, some of whose rivals compute another function; first calls and the cache.
ASIDE = ("auto", "cpu", "distributed", "programs", "service")
HEADER = (
    "family", "on", "cases with a rival", "fastest in", "a rival is faster by more than 5 % in",
    "best rival takes, geometric mean", "least", "most", "everything measured",
)  # fmt: skip


def measured(results: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
    """The results of families that have a rival in some case."""
    return [(f, found) for f, found in results if f not in ASIDE and compared(found["rows"])]


def compared(rows: list[dict]) -> list[dict]:
    """The times that a rival's stands beside, but not those of other GPUs' kernels."""
    own = [row for row in rows if not row["case"].endswith(PORTABLE)]
    return [row for row in own if others(row["rivals"]) and row["unit"] in TIMES]


def lost(rows: list[dict]) -> list[dict]:
    """Where a rival is faster by more than a tie, the worst first."""
    found = [row for row in compared(rows) if speed_up(row) * TIE < 1]
    return sorted(found, key=speed_up)


def overview(results: list[tuple[str, dict]]) -> str:
    """README's: a line a family and GPU."""
    some = sorted(measured(results), key=lambda each: (each[0], short(each[1]["gpu"])))
    return table(HEADER, "|---|---|" + "---:|" * 6 + "---|", [_line(*each) for each in some])


def page(family: str) -> str:
    """The path of a family's page."""
    return f"docs/results/{family}.md"


def section(rows: list[dict]) -> str:
    """A page's: each case in which a rival is faster, or that there is none."""
    found = lost(rows)
    if not found:
        return "No rival is faster by more than 5 % in any case."
    lines = (
        line((row["case"], quantity(row["ours"], row["unit"]), _best(row), _times(speed_up(row))))
        for row in found
    )
    return table(("case", "kernlib", "rival", "rival takes"), "|---|---:|---|---:|", lines)


def heading(gpu: str) -> str:
    """That of a page's list of cases in which a rival is faster."""
    return f"Where a rival is faster, on {gpu}"


def _line(family: str, found: dict) -> str:
    rows, link = compared(found["rows"]), page(family)
    whole, most = summarise(rows), max(map(speed_up, rows))
    anchor = heading(found["gpu"]).lower().replace(",", "").replace(" ", "-")
    losses = f"[{len(lost(rows))}]({link}#{anchor})"
    counts = str(whole.compared), str(whole.wins), losses
    times = map(_times, (whole.speed_up, whole.least, most))
    every = f"[{link.removeprefix('docs/')}]({link})"
    return line((title(family), short(found["gpu"]), *counts, *times, every))


def _best(row: dict) -> str:
    name = best_rival(row)
    return f"{name} {quantity(row['rivals'][name], row['unit'])}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}×"
