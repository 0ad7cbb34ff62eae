"""Products with unstructured sparse matrices: kernlib, its floor, cuBLAS, MACKO's format, cuSPARSE.

``python -m benchmarks.sparse --json benchmarks/results/h200/sparse.json``

Sections: ``headline`` (five shapes, four densities, one and eight columns), ``frozen`` (the same
with matrices that nobody writes, as ``SparseMatrix.freeze`` promises), ``compress``,
``columns`` (2 to 64), ``quantised`` (values in fewer bits), ``formats`` (each one alone, of which
the table of rates is made) and ``grid`` (31 shapes by 11 densities). ``--only`` chooses some.
``python -m benchmarks.sparse.plot`` draws the speed-up over the density.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session, attempt
from benchmarks.common.timing import relative_error
from benchmarks.sparse import summary
from benchmarks.sparse.problems import (
    COMPRESS_MS,
    OVER_ERROR,
    SECTIONS,
    Problem,
    drawn,
    exact,
    problems,
    vectors,
    weight,
)
from benchmarks.sparse.rivals import Contender, compressed, cublas, rivals
from kernlib import sparse
from kernlib.families.sparse.matrix import rounded

INCLUDED = ("common/math.cuh", *harness.headers("sparse"))
SOURCE = "\n".join(f'#include "{name}"' for name in INCLUDED)
REPLAYS, FEW_REPLAYS = 50, 10
LONG_REPLAY_MS = 3.0  # a graph of many copies of a large matrix: its median settles sooner
COMPRESSIONS = 7
WARM_MS = 30.0
LARGEST_ERROR = 2e-2  # of a result that is right in bfloat16 or better


# Timing.


class Timer:
    """Milliseconds of one of many calls, each of which has data of its own."""

    def replayed(self, calls: Sequence[Callable], quick: bool = False) -> float:
        """In a CUDA graph of all: the median of its replays, one behind the other."""
        graph, results = torch.cuda.CUDAGraph(), []
        for call in calls:  # nothing is compiled or loaded in a capture
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for call in calls:
                results.append(call())  # kept, so that no two calls share an output
        graph.replay()
        return self._median(graph.replay, quick) / len(calls)

    def queued(self, calls: Sequence[Callable], quick: bool = False) -> float:
        """Launched one by one, for calls that a graph cannot hold."""

        def every() -> None:
            for call in calls:
                call()

        every()
        return self._median(every, quick) / len(calls)

    def once(self, call: Callable, quick: bool = False) -> float:
        """By the host's clock, from call to result, for one that waits for the device itself."""
        times = []
        for _ in range(1 if quick else COMPRESSIONS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            result = call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            del result
        return statistics.median(times)

    def _median(self, run: Callable, quick: bool) -> float:
        first = self._spans(run, 1)[0]
        if not quick:
            self._warm(run, first)
        count = 1 if quick else FEW_REPLAYS if first > LONG_REPLAY_MS else REPLAYS
        return statistics.median(self._spans(run, count))

    def _warm(self, run: Callable, each_ms: float) -> None:
        """Runs for WARM_MS: while matrices were made the GPU's clocks have fallen, and what is
        measured first would take up to 9 % longer."""
        for _ in range(int(WARM_MS / max(each_ms, 0.01)) + 1):
            run()
        torch.cuda.synchronize()

    def _spans(self, run: Callable, count: int) -> list[float]:
        """The events lie behind one another, so that no run waits for the host."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def timer(session: Session) -> Timer:
    if session.timer is None:
        session.timer = Timer()
    return session.timer


# A row.


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    dense, x = weight(problem, device), vectors(problem, device)
    wanted = exact(dense, x)

    matrix = sparse.compress(dense, problem.format, problem.columns, problem.values)
    # Of values in fewer bits the product of those values, before they are rounded to the dtype.
    own = exact(rounded(matrix, torch.float32).to_dense(), x) if problem.values else wanted
    ours, error = fastest(compressed(matrix, x, problem.frozen), own, session)
    floor, bound = problem.floor_us(matrix.nbytes), f"bytes, {matrix.format}"
    row = Row(problem.name, "us", ours, floor, bound, error=error)
    if problem.section != "formats":
        found = beside_cublas(problem, dense, x, wanted, session)
        row.rivals["cublas"], row.rival_errors["cublas"] = found
        row.must_error = OVER_ERROR * row.rival_errors["cublas"]
    for name, make in rivals(problem, dense, x).items():
        found = attempt(name, problem.name, lambda make=make: fastest(make(), wanted, session))
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found
    row.must = problem.must_us(row.rivals, session.ours.get(problem.named(1)))
    return row


def beside_cublas(problem: Problem, dense, x, wanted, session: Session) -> tuple[float, float]:
    """The fastest of cuBLAS's forms. Zeros take it as long as other numbers, so that the form found
    for a shape is measured alone at its other densities."""
    contender = cublas(dense, x)
    key = f"cublas {problem.rows}x{problem.cols} {problem.kind} {problem.columns} "
    known = [form for form in contender.forms if key + form in session.ours]
    if known:
        forms = {form: contender.forms[form] for form in known}
        return fastest(contender._replace(forms=forms), wanted, session)
    every = {
        form: fastest(contender._replace(forms={form: calls}), wanted, session)
        for form, calls in contender.forms.items()
    }
    form = min(every, key=every.__getitem__)
    session.ours[key + form] = every[form][0]
    return every[form]


def fastest(contender: Contender, wanted: torch.Tensor, session: Session) -> tuple[float, float]:
    """Microseconds of the fastest form, and its error. Raises ValueError for a result that is zero
    or wrong."""
    clock, found = timer(session), []
    for calls in contender.forms.values():
        error = checked_error(calls[0](), wanted)
        way = clock.replayed if contender.captured else clock.queued
        found.append((way(calls, session.quick) * 1e3, error))
    return min(found)


def checked_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error of a result. Raises ValueError where it is that of another product."""
    if result.shape != wanted.shape:
        raise ValueError(f"the result is {tuple(result.shape)}, not {tuple(wanted.shape)}")
    if not (wanted.norm() > 0 and torch.count_nonzero(result) > 0):
        raise ValueError("the product is zero everywhere")
    error = relative_error(result, wanted)
    if error > LARGEST_ERROR:
        raise ValueError(f"the result is wrong: its error is {error:.1e}")
    return error


def measure_compression(problem: Problem, session: Session, device: str = "cuda") -> Row:
    """From the dense matrix to the compressed one, the choice of the format included."""
    dense = weight(problem, device)
    matrix = sparse.compress(dense)
    if not torch.equal(matrix.to_dense(), dense):
        raise ValueError("the compressed matrix is another one")
    floor, bound = problem.compress_floor_ms(matrix.nbytes), f"bytes, {matrix.format}"
    ours = timer(session).once(lambda: sparse.compress(dense), session.quick)
    return Row(problem.name, "ms", ours, floor, bound, must=COMPRESS_MS)


# The run.


def cases(section: str) -> list[Case]:
    work = measure_compression if section == "compress" else measure
    return [Case(p.name, lambda s, p=p: tidied(work, p, s)) for p in problems(section)]


def tidied(work: Callable, problem: Problem, session: Session) -> Row:
    row = work(problem, session)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # copies of up to 2.4 GB, in ever other sizes
    return row


def watched(case: Case, rows: list[dict], start: float, count: int) -> Case:
    """The case, saying on stderr what it found and how far the run is; ``rows`` collects its."""

    def measure(session: Session) -> Row:
        row = case.measure(session)
        rows.append(row.as_json())
        passed = time.perf_counter() - start
        say(f"{passed:4.0f} s, {len(rows)} of {count}: {summary.line(rows[-1])}")
        return row

    return Case(case.name, measure)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="only this section")
    parser.add_argument("--json", type=Path, help="write results here, over those of the same case")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one repetition of everything")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen cases, print their table and a summary. Returns the exit status."""
    options = parse(argv)
    every = [(section, case) for section in SECTIONS for case in cases(section)]
    wanted = [case for section, case in every if section in (options.only or SECTIONS)]
    names = [case.name for case in harness.chosen(wanted, options.case)]
    if not names:
        say("no case is called so")
        return 1
    rows: list[dict] = []
    start, chosen = time.perf_counter(), set(names)
    # All cases, for their order in the file; the harness takes those that are named.
    listed = [
        watched(case, rows, start, len(names)) if case.name in chosen else case for _, case in every
    ]
    rest = [word for name in names for word in ("--case", name)]
    rest += ["--json", str(options.json)] if options.json else []
    rest += ["--quick"] if options.quick else []
    status = harness.main("sparse", listed, SOURCE, rest)
    drawn.cache_clear()
    print("\n".join(summary.lines(rows)))
    return status
