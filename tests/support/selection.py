"""Which cases of a test a run has.

A parametrised test has as many cases as its lists have products. A run without options has two of
each: those that together show the most pairs of values of different lists, as most faults need no
more than two to meet. Of tests that run kernels on the host, which compile for seconds, it has
those marked as below, at least one for each file of device code. ``--cases many`` and ``--cases
all`` have more. A test that is named on the command line (``file.py::test``) runs whole.

``@pytest.mark.few(N)`` says how many cases make the few of a test: more where each is a promise of
its own, one where each costs seconds, none where even that one belongs to longer runs.
``@pytest.mark.few(by="operation")`` has one case for each value of that parameter.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from itertools import combinations

import pytest

FEW, FEW_EMULATED = 2, 0
MANY = 8
ALL = 1 << 30
NAMED = {"few": FEW, "many": MANY, "all": ALL}


def count_of_cases(text: str) -> int | str:
    """What follows ``--cases``. Raises argparse.ArgumentTypeError."""
    if text in NAMED:
        return text
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f"--cases must be few, many, all or a number from 1 on, got {text!r}"
        )
    return int(text)


def cases_of(config: pytest.Config) -> int | str:
    """How many cases the tests of this run have."""
    chosen = config.option.cases
    if chosen is None:
        named = any("::" in str(argument) for argument in config.args)
        chosen = "all" if named else "few"
    return chosen


def limit_of(item: pytest.Item, cases: int | str) -> int:
    """How many cases this test has at most in such a run."""
    if cases != "few":
        return NAMED.get(cases, cases)
    mark = item.get_closest_marker("few")
    if mark is not None and mark.args:
        return mark.args[0]
    return FEW_EMULATED if item.get_closest_marker("emulated") else FEW


def thinned(items: list, cases: int | str) -> list:
    """Of the cases of one function those that run, in their order. Slow ones are chosen apart."""
    chosen = []
    for slow in (False, True):
        group = [item for item in items if bool(item.get_closest_marker("slow")) == slow]
        if group:
            chosen += _of_one_speed(group, cases)
    running = set(map(id, chosen))
    return [item for item in items if id(item) in running]


def _of_one_speed(items: list, cases: int | str) -> list:
    mark = items[0].get_closest_marker("few")
    if cases == "few" and mark is not None and "by" in mark.kwargs and len(items) > 1:
        first = {id(item.callspec.params[mark.kwargs["by"]]): item for item in reversed(items)}
        return list(first.values())
    rows = [values_of(item) for item in items]
    return [items[i] for i in covering(rows, limit_of(items[0], cases))]


def values_of(item: pytest.Item) -> tuple[Hashable, ...]:
    """Where in each list of parameters a case takes its value from."""
    call = getattr(item, "callspec", None)
    return tuple(call.indices.values()) if call is not None else ()


def covering(rows: Sequence[tuple], limit: int) -> list[int]:
    """Places of at most ``limit`` rows that together have as many pairs of values of two columns
    as one finds by taking, time after time, the row with the most new ones. Where all rows differ
    in one way only, they are the first, the last and those evenly between."""
    if len(rows) <= limit:
        return list(range(len(rows)))
    columns = {column for column in zip(*rows, strict=True) if len(set(column)) > 1}
    if len(columns) < 2:
        step = (len(rows) - 1) / max(1, limit - 1)
        return sorted({round(i * step) for i in range(limit)})
    pairs = [_values_and_pairs(row) for row in zip(*sorted(columns), strict=True)]
    chosen: list[int] = []
    seen: set = set()
    while len(chosen) < limit:
        left = (i for i in range(len(rows)) if i not in chosen)
        best = max(left, key=lambda i: (len(pairs[i] - seen), -i))
        chosen.append(best)
        seen |= pairs[best]
    return sorted(chosen)


def _values_and_pairs(row: tuple) -> set:
    placed = list(enumerate(row))
    return {*placed, *combinations(placed, 2)}
