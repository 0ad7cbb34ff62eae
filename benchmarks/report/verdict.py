"""Where kernlib is the fastest and where a rival is: README's table, and a list on each page."""

from __future__ import annotations

from benchmarks.common.harness import PORTABLE, number
from benchmarks.common.summary import TIE, best_rival, others, speed_up, summarise
from benchmarks.report.tables import line, quantity, short, table, title

WORST = 3  # cases of a family that README names
TIMES = ("ms", "us")
LOSSES = "where a rival is faster by more than 5 %, the worst first"
# No families: choices of all of them; calls without a GPU; first calls and the cache.
ASIDE = ("auto", "cpu", "service")
HEADER = (
    "family", "on", "cases with a rival", "fastest in", "best rival takes, mean", "least", "most",
    "everything measured",
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
    """README's: a line a family and GPU, and what each loses."""
    some = [(name, short(found["gpu"]), found["rows"]) for name, found in measured(results)]
    some.sort(key=lambda each: each[:2])
    losses = [_losses(family, gpu, lost(rows)) for family, gpu, rows in some if lost(rows)]
    parts = [table(HEADER, "|---|---|" + "---:|" * 5 + "---|", [_line(*each) for each in some])]
    if losses:
        parts.append(table(("family", "on", LOSSES), "|---|---|---|", losses))
    return "\n\n".join(parts)


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


def _line(family: str, gpu: str, rows: list[dict]) -> str:
    some = compared(rows)
    found, most = summarise(some), max(map(speed_up, some))
    times = map(_times, (found.speed_up, found.least, most))
    link = f"[{page(family).removeprefix('docs/')}]({page(family)})"
    return line((title(family), gpu, str(found.compared), str(found.wins), *times, link))


def _losses(family: str, gpu: str, rows: list[dict]) -> str:
    named = ", ".join(f"`{row['case']}` ({_best(row)})" for row in rows[:WORST])
    behind = f" and {len(rows) - WORST} more" if len(rows) > WORST else ""
    return line((title(family), gpu, named + behind))


def _best(row: dict) -> str:
    name = best_rival(row)
    return f"{name} {quantity(row['rivals'][name], row['unit'])}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}×"
