"""What kernlib chooses by itself, beside all of its own kernels and formats and torch.

``python -m benchmarks.auto --json benchmarks/results/h100/auto.json``; a hundred random calls of a
family take about a minute. A call that torch refuses, as for want of memory, has no row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.auto.problems import Call, Problem, Way, problems
from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session, attempt
from benchmarks.common.summary import TIE
from kernlib import ahead
from kernlib.jit import service, tuning
from kernlib.runtime.ahead import Candidate
from kernlib.runtime.devices import arch_of
from kernlib.runtime.plan import forget_plans

COMPILERS = 16
HEADERS = [
    name
    for family in ("pairwise", "kronecker_sparse", "kronecker_product", "sparse", "blocksparse")
    for name in harness.headers(family)
]
SOURCE = "\n".join(f'#include "{name}"' for name in HEADERS)


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    """The time of a call, at most TIE times that of the fastest other way."""
    call = problem.make(device)

    def timed(way: Way) -> float:
        way.call(*way.buffers)
        return session.time(way.call, way.buffers)

    row = Row(problem.name, "ms", timed(call.auto))
    for name, way in call.others.items():
        found = attempt(name, problem.name, partial(timed, way))
        if found is not None:
            row.rivals[name] = found
    for candidate in own_kernels(call):
        name = "own " + " ".join(f"{k}={v}" for k, v in candidate.choice.items())
        with chosen(candidate.choice):
            found = attempt(name, problem.name, partial(timed, call.auto))
        if found is not None:
            row.rivals[name] = found
    row.must = TIE * min(row.rivals.values(), default=row.ours)
    return row


def own_kernels(call: Call) -> list[Candidate]:
    """Those that could compute it, compiled side by side, if there are several."""
    if call.asked is None or not torch.cuda.is_available():
        return []
    descriptor, operands, arguments = call.asked
    found = ahead.candidates(descriptor, *operands, **arguments).kernels
    if len(found) < 2:
        return []
    arch = arch_of(torch.cuda.current_device())
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda each: service.build(each.spec, arch), found))
    return found


@contextmanager
def chosen(choice: dict):
    """Plans by a choice, as if it had been tuned."""
    words, before = {name: str(value) for name, value in choice.items()}, tuning.choice
    forget_plans()
    tuning.choice = lambda *problem: words
    try:
        yield
    finally:
        tuning.choice = before
        forget_plans()


def tidied(problem: Problem, session: Session) -> Row:
    row = measure(problem, session)
    torch.cuda.empty_cache()  # tensors in ever other sizes
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases and print their table. Returns the exit status."""
    cases = [Case(problem.name, partial(tidied, problem)) for problem in problems()]
    return harness.main("auto", cases, SOURCE, argv)
