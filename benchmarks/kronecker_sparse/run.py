"""Products with Kronecker-sparse factors: kernlib, its floor, and torch's ways to them.

``python -m benchmarks.kronecker_sparse --json benchmarks/results/h200/kronecker_sparse.json``

Sections: ``patterns`` (eight, in both layouts and all kinds of numbers), ``grid`` (40 of KSMM's
376), ``train`` (a product and its gradients) and ``host`` (the hot call, compile times, which need
no GPU). ``--only`` chooses some.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session, attempt, note
from benchmarks.common.timing import REPLAY_BELOW_MS, CudaTimer, relative_error, sample_rows
from benchmarks.kronecker_sparse import host, summary, training
from benchmarks.kronecker_sparse.problems import (
    KINDS,
    PATTERNS,
    Problem,
    exact,
    float32_products,
    pick,
    problems,
    sample,
    stand_ins,
    tensors,
)
from benchmarks.kronecker_sparse.rivals import rivals, seconds
from kernlib.jit import targets

INCLUDED = ("common/math.cuh", *harness.headers("kronecker_sparse"))
SOURCE = "\n".join(f'#include "{name}"' for name in INCLUDED)
SECTIONS = ("patterns", "grid", "train", "host")
GRID_REPETITIONS = 3
COMPILE_BUDGET_S = 75.0  # for torch.compile, first calls and timing of all cases
COMPILERS = 16  # threads that compile kernels before the first case


class Planned(NamedTuple):
    """A case, the seconds it takes by estimate, and its problem, if it is one."""

    case: Case
    seconds: float
    problem: Problem | None = None


def planned(section: str) -> list[Planned]:
    """The cases of a section."""
    if section == "host":
        return [Planned(case, host.SECONDS[case.name]) for case in host.cases()]
    if section == "grid":
        found, work = problems("grid", sample(), ("fp16", "fp32")), measure
    elif section == "train":
        found, work = problems("train", PATTERNS, ("fp16", "fp32")), training.measure
    else:
        found, work = problems("patterns", PATTERNS, tuple(KINDS)), measure
    return [Planned(Case(p.name, lambda s, p=p: work(p, s)), seconds(p), p) for p in found]


# A row.


def kernel(problem: Problem) -> Callable:
    """``f(x, weight, out)`` by kernlib."""
    descriptor = problem.descriptor
    return lambda x, weight, out: kl.run_kernel(descriptor, x, weight, out=out)


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    x, weight, out = tensors(problem, device)
    rows = sample_rows(problem.batch, device)
    wanted = exact(problem, x, weight, rows)

    def timed(call: Callable, held: torch.Tensor) -> tuple[float, float]:
        return time_and_error(problem, session, call, (x, held, out), rows, wanted)

    with float32_products(problem):
        ours, error = timed(kernel(problem), weight)
        row = Row(problem.name, "ms", ours, *problem.floor(), error=error)
        row.must_error = KINDS[problem.kind].must_error
        for name, make in rivals(problem).items():
            if name == "torch.compile":
                found = within_budget(problem, session, weight, make, timed)
            else:
                found = attempt(name, problem.name, lambda make=make: run(make, weight, timed))
            if found is not None:
                row.rivals[name], row.rival_errors[name] = found
    return row


def run(make: Callable, weight: torch.Tensor, timed: Callable) -> tuple[float, float]:
    """Time and error of a rival."""
    rival = make()
    return timed(rival.call, rival.store(weight))


def within_budget(problem: Problem, session: Session, weight, make, timed):
    """As :func:`run`, for torch.compile: what it takes is counted, and past the budget it is left
    out, so that a slow compiler does not hold up everything else."""
    spent = session.ours.get("torch.compile", 0.0)
    if spent > COMPILE_BUDGET_S:
        note(f"{problem.name}: torch.compile is left out, it has taken {spent:.0f} s so far")
        return None
    start = time.perf_counter()
    found = attempt("torch.compile", problem.name, lambda: run(make, weight, timed))
    session.ours["torch.compile"] = spent + time.perf_counter() - start
    return found


def time_and_error(problem: Problem, session: Session, call, buffers, rows, wanted):
    """Milliseconds and error; the call that gives the error warms up the ones that are timed.
    Raises ValueError for a result that is not one contiguous tensor like ``out``."""
    out = buffers[2].fill_(math.nan)
    result = call(*buffers)
    if result.shape != out.shape or not result.is_contiguous():
        raise ValueError(f"the result is {tuple(result.shape)} with strides {result.stride()}")
    error = relative_error(pick(problem, result, rows), wanted)
    del result  # of several GB
    if problem.section == "grid":
        return briefly(session, call, buffers), error
    return session.time(call, buffers), error


def briefly(session: Session, call: Callable, buffers: tuple) -> float:
    """As ``session.time``, with fewer repetitions."""
    if session.timer is None:
        session.timer = CudaTimer()
    first = session.timer.swept(call, buffers)
    count = 1 if session.quick else GRID_REPETITIONS
    if first < REPLAY_BELOW_MS:
        return session.timer.replayed(call, buffers, count)
    more = [session.timer.swept(call, buffers) for _ in range(count - 1)]
    return statistics.median([first, *more])


# The run.


def compile_ahead(found: Sequence[Problem]) -> None:
    """Compile the kernels of all problems at once, where one by one takes some 0.3 s each."""
    arch = targets.arch_of(torch.cuda.get_device_capability())

    def build(problem: Problem) -> None:
        made = stand_ins(problem)
        kl.compile(problem.descriptor, archs=arch, specs=made, workers=1, progress=False)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(build, found))


def watched(plans: Sequence[Planned], rows: list[dict]) -> list[Case]:
    """The cases, each saying on stderr what it found and how far the run is; ``rows`` collects
    theirs."""
    start, whole = time.perf_counter(), sum(plan.seconds for plan in plans)

    def watch(case: Case, session: Session) -> Row:
        row = case.measure(session)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # tensors of up to 9 GB a case, in ever other sizes
        rows.append(row.as_json())
        passed = time.perf_counter() - start
        say(f"{passed:4.0f} s of about {whole:.0f}: {summary.line(rows[-1])}")
        return row

    return [Case(p.case.name, lambda s, case=p.case: watch(case, s)) for p in plans]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kronecker_sparse")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="only this section")
    parser.add_argument("--json", type=Path, help="write results here, over those of the same case")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one repetition of everything")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen cases, print their table and a summary. Returns the exit status."""
    options = parse(argv)
    every = {name: planned(name) for name in SECTIONS}
    wanted = [plan for name in options.only or SECTIONS for plan in every[name]]
    names = {case.name for case in harness.chosen([plan.case for plan in wanted], options.case)}
    chosen = [plan for name in SECTIONS for plan in every[name] if plan.case.name in names]
    if not chosen:
        say("no case is called so")
        return 1
    if torch.cuda.is_available():
        compile_ahead([plan.problem for plan in chosen if plan.problem is not None])
    # All cases, for their order in the file; the harness takes those that are named.
    rest, rows = [], []
    watching = {case.name: case for case in watched(chosen, rows)}
    cases = [watching.get(p.case.name, p.case) for name in SECTIONS for p in every[name]]
    for name in names:
        rest += ["--case", name]
    rest += ["--json", str(options.json)] if options.json else []
    rest += ["--quick"] if options.quick else []
    status = harness.main("kronecker_sparse", cases, SOURCE, rest)
    print("\n".join(summary.lines(rows)))
    return status
