"""CPU tensors beside plain torch, in one process and by the same threads.

``python -m benchmarks.cpu --json benchmarks/results/cpu/cpu.json``. A time is the least of many:
whatever else runs on a CPU only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session
from benchmarks.cpu.problems import PROBLEMS, Problem

SECONDS, QUICK_SECONDS = 4.0, 0.2  # of each case, of both calls in turn
FEWEST_TURNS = 3
BATCH_MS = 0.5  # of calls that are timed together
MICROSECONDS_BELOW_MS = 1.0
HOST_MS = 0.04  # that a small call may take longer than torch's


def least(calls: Sequence[Callable], seconds: float) -> list[float]:
    """Milliseconds of each call, the least of several batches of each in turn."""
    counts = [max(1, int(BATCH_MS / max(_batch(call, 2), 1e-4))) for call in calls]
    found = [float("inf")] * len(calls)
    turns, end = 0, time.perf_counter() + seconds
    while turns < FEWEST_TURNS or time.perf_counter() < end:
        times = [_batch(call, count) for call, count in zip(calls, counts, strict=True)]
        found = list(map(min, found, times))
        turns += 1
    return found


def _batch(call: Callable, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) * 1e3 / count


def permitted(problem: Problem, theirs: float, pace: float = 1.0) -> float:
    """Milliseconds that a call may take where torch's takes ``theirs``, on a CPU that takes
    ``pace`` times as long for a small call as that of the committed figures."""
    return max(problem.factor * theirs, theirs + HOST_MS * pace)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """In the Frobenius norm, beside that of what is right."""
    return float((found.double() - exact).norm() / exact.norm())


def measure(name: str, session: Session) -> Row:
    """The row of a case."""
    problem = PROBLEMS[name]()
    exact = problem.exact()
    errors = [error(call(), exact) for call in (problem.ours, problem.torchs)]
    seconds = QUICK_SECONDS if session.quick else SECONDS
    ours, theirs = least((problem.ours, problem.torchs), seconds)
    must, unit = permitted(problem, theirs), "us" if theirs < MICROSECONDS_BELOW_MS else "ms"
    scale = harness.UNITS_PER_MS[unit]
    return Row(
        name,
        unit,
        ours * scale,
        rivals={"torch": theirs * scale},
        error=errors[0],
        rival_errors={"torch": errors[1]},
        must=must * scale,
    )


def machine() -> dict[str, str]:
    """The head of a result file, with the CPU in the GPU's place."""
    name = f"{harness.cpu()}, {torch.get_num_threads()} threads"
    return {**harness.machine(), "gpu": name, "driver": "none"}


def cases() -> list[Case]:
    return [Case(name, lambda session, name=name: measure(name, session)) for name in PROBLEMS]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return harness.main("cpu", cases(), "", argv, machine())
