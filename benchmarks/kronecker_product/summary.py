"""What many rows of the benchmark of Kronecker products say together, in the few rows that README
has room for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.common.summary import Summary, summarise
from benchmarks.kronecker_product.problems import SMALL

CASE = re.compile(r"kronecker_product (left )?(\d+) (\S+) (\w+?)( portable)?$")
SHOWN = ("fp32", "fp16")  # of the named cases, row by row; the others are summarised
FEW = {f"{rows} {size}^{count}" for rows, size, count in SMALL}


class Place(NamedTuple):
    """What a case's name says: "named", "left", "portable", "small" or "drawn", rows and factors,
    kind of numbers."""

    section: str
    factors: str
    kind: str


def place(case: str) -> Place:
    left, rows, sizes, kind, portable = CASE.match(case).groups()
    factors, section = f"{rows} {sizes}", "left" if left else "portable" if portable else "named"
    if factors in FEW:
        section = "small"
    elif "^" not in sizes:
        section = "drawn"
    return Place(section, factors, kind)


def factors(rows: Sequence[dict]) -> dict[str, dict[str, dict]]:
    """Side, kernels, rows and factors to the rows of SHOWN kinds."""
    found: dict[str, dict[str, dict]] = {}
    words = {"named": "", "left": ", left", "portable": ", portable kernels"}
    for row in sorted(rows, key=lambda row: "portable" in row["case"]):
        at = place(row["case"])
        if at.section in words and at.kind in SHOWN:
            found.setdefault(at.factors + words[at.section], {})[at.kind] = row
    return found


def summaries(rows: Sequence[dict]) -> dict[str, Summary]:
    """Of what :func:`factors` leaves out, section by section and kind by kind."""
    found: dict[str, list[dict]] = {}
    words = {"named": "the same", "small": "small", "drawn": "factors of drawn sizes"}
    for row in rows:
        at = place(row["case"])
        if at.section in words and (at.section != "named" or at.kind not in SHOWN):
            found.setdefault(f"{words[at.section]}, {at.kind}", []).append(row)
    return {name: summarise(part) for name, part in found.items()}
