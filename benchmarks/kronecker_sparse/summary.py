"""What many rows of the Kronecker-sparse benchmark say together: counts and means, in lines for the
terminal and in the few rows that its page has room for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.common.harness import number
from benchmarks.common.summary import Summary, best_rival, speed_up, summarise

CASE = re.compile(r"kronecker_sparse (?:(grid|train) )?(\(\d+,\d+,\d+,\d+\)) (first|last) (\w+)$")
SHOWN = ("fp16", "fp32")  # of the section ``patterns``, row by row; the others are summarised
LEFT_OUT = ("kronecker_sparse compile median",)  # of its page


class Place(NamedTuple):
    """What a case's name says."""

    section: str
    pattern: str
    layout: str
    kind: str


def place(case: str) -> Place | None:
    """Section, pattern, layout and kind of numbers, None for cases that have none of these."""
    found = CASE.match(case)
    return Place(found[1] or "patterns", *found.groups()[1:]) if found else None


def groups(rows: Sequence[dict], by: Callable[[Place], str]) -> dict[str, list[dict]]:
    """The rows with a pattern under the names that ``by`` gives them, in order; none under ""."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        at = place(row["case"])
        name = by(at) if at else ""
        if name:
            found.setdefault(name, []).append(row)
    return found


# For the terminal.


def line(row: dict) -> str:
    """One row, briefly."""
    text = f"{row['case']}: {number(row['ours'])} {row['unit']}"
    if row["floor"]:
        text += f", {number(row['ours'] / row['floor'])} x floor"
    if row["rivals"]:
        name = best_rival(row)
        text += f", {name} {number(row['rivals'][name])} ({number(speed_up(row), 2)} x)"
    return text


def lines(rows: Sequence[dict]) -> list[str]:
    """A line for each section, kind of numbers and layout, and for the factors with d > 1."""
    found = groups(rows, lambda at: f"{at.section} {at.kind} {at.layout}")
    found |= groups(rows, lambda at: f"{at.section} {at.kind} d > 1" * (not _is_block_diagonal(at)))
    return [f"{name}: {_sentence(summarise(found[name]))}" for name in sorted(found)]


def _is_block_diagonal(at: Place) -> bool:
    return at.pattern.endswith(",1)")


def _sentence(found: Summary) -> str:
    text = f"{found.cases} cases"
    if found.over_floor is not None:
        text += f", {number(found.over_floor)} x floor"
    if found.speed_up is not None:
        text += (
            f", fastest in {found.wins} of {found.compared}, best rival "
            f"{number(found.speed_up)} x on average, {number(found.least)} x at least"
        )
    return text + (f", error {found.error:.1e}" if found.error is not None else "")


# For its page.


def factors(rows: Sequence[dict]) -> dict[str, dict[str, dict]]:
    """Pattern and layout to the rows of SHOWN kinds."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        at = place(row["case"])
        if at and at.section == "patterns" and at.kind in SHOWN:
            found.setdefault(f"{at.pattern} {at.layout}", {})[at.kind] = row
    return found


def summaries(rows: Sequence[dict]) -> dict[str, Summary]:
    """Of what :func:`factors` leaves out, section by section and kind by kind."""
    found = groups(rows, _group)
    return {name: summarise(part) for name, part in found.items()}


def _group(at: Place) -> str:
    if at.section == "patterns":
        return "" if at.kind in SHOWN else f"the same in {at.kind}"
    named = {"grid": "grid of patterns with d > 1", "train": "training step"}
    return f"{named[at.section]}, {at.kind}"


def others(rows: Sequence[dict]) -> list[dict]:
    """The rows without a pattern, to be shown as those of other families are."""
    return [row for row in rows if place(row["case"]) is None and row["case"] not in LEFT_OUT]
