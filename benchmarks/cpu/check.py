"""Fails where a CPU call takes three times what it may beside torch's.

``python -m benchmarks.cpu.check [CASE ...]``. It looks at the clock, so no test does it: a busy
machine takes time from either call, and one of several attempts must do.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

from benchmarks.common.harness import UNITS_PER_MS
from benchmarks.cpu import run
from benchmarks.cpu.problems import PROBLEMS

COMMITTED = Path(__file__).resolve().parents[1] / "results" / "cpu" / "cpu.json"
OFF = 3.0  # times what a case may take
ATTEMPTS = 8
SECONDS = 2.0
SMALLEST = "cdist p=2 10x10x3"


@cache
def pace() -> float:
    """How many times as long torch's smallest call takes here as in the committed figures: what a
    call takes in Python was 3 times as much on one machine as on another."""
    rows = json.loads(COMMITTED.read_text())["rows"]
    (row,) = (row for row in rows if row["case"] == SMALLEST)
    (here,) = run.least((PROBLEMS[SMALLEST]().torchs,), SECONDS)
    return max(1.0, here * UNITS_PER_MS[row["unit"]] / row["rivals"]["torch"])


def ratio(name: str) -> float:
    """What a case takes beside what it may, the least of several attempts until one is enough."""
    problem, ratios = PROBLEMS[name](), []
    for call in (problem.ours, problem.torchs):
        call()
    while len(ratios) < ATTEMPTS and (not ratios or ratios[-1] > OFF):
        ours, theirs = run.least((problem.ours, problem.torchs), SECONDS)
        ratios.append(ours / run.permitted(problem, theirs, pace()))
    return min(ratios)


def main(names: list[str]) -> int:
    """Returns the exit status."""
    ratios = {name: ratio(name) for name in names or PROBLEMS}
    for name, off in ratios.items():
        print(f"{off:6.2f}  {name}{'  TOO SLOW' * (off > OFF)}")
    return int(any(off > OFF for off in ratios.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
