"""What many rows of the benchmark of Kronecker products say together, in the few rows that its page
has room for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common.summary import Summary, summarise
from benchmarks.kronecker_product.problems import SMALL

CASE = re.compile(r"kronecker_product (left |train )?(\d+) (\S+) (\w+?)( portable)?$")
SHOWN = ("fp32", "fp16")  # of the named cases, row by row; the others are summarised
FEW = {f"{rows} {size}^{count}" for rows, size, count in SMALL}


class Place(NamedTuple):
    """What a case's name says: "named", "left", "train", "portable", "small" or "drawn", rows and
    factors, kind of numbers."""

    section: str
    factors: str
    kind: str


def place(case: str) -> Place | None:
    """None for cases that have none of these."""
    found = CASE.match(case)
    if found is None:
        return None
    prefix, rows, sizes, kind, portable = found.groups()
    factors, section = f"{rows} {sizes}", (prefix or "named").strip()
    if portable:
        section = "portable"
    elif factors in FEW:
        section = "small"
    elif "^" not in sizes:
        section = "drawn"
    return Place(section, factors, kind)


def factors(rows: Sequence[dict]) -> dict[str, dict[str, dict]]:
    """Side, kernels, rows and factors to the rows of SHOWN kinds."""
    found: dict[str, dict[str, dict]] = {}
    words = {"named": "", "left": ", left", "train": ", training", "portable": ", portable kernels"}
    for section, word in words.items():
        for row in rows:
            at = place(row["case"])
            if at and at.section == section and at.kind in SHOWN:
                found.setdefault(at.factors + word, {})[at.kind] = row
    return found


def summaries(rows: Sequence[dict]) -> dict[str, Summary]:
    """Of what :func:`factors` leaves out, section by section and kind by kind."""
    found: dict[str, list[dict]] = {}
    words = {"named": "the same", "small": "small", "drawn": "factors of drawn sizes"}
    for row in rows:
        at = place(row["case"])
        if at and at.section in words and (at.section != "named" or at.kind not in SHOWN):
            found.setdefault(f"{words[at.section]}, {at.kind}", []).append(row)
    return {name: summarise(part) for name, part in found.items()}


def others(rows: Sequence[dict]) -> list[dict]:
    """The rows that are no products, to be shown as those of other families are."""
    return [row for row in rows if place(row["case"]) is None]
