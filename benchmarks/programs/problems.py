"""What the programs share: what a case is, how a step is made and captured, and how steps are timed
in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from benchmarks.common.harness import UNITS_PER_MS, Row, Session, attempt

Call = Callable[[], object]
WARM_UPS = 5  # calls behind the first one, which compiles

# Rounds of calls. None of microseconds fills the queue of the GPU, so that the host never waits.
ROUNDS, QUICK_ROUNDS = {"us": 21, "ms": 7}, 1
CALLS = {"us": 100, "ms": 10}


class Calls(NamedTuple):
    """kernlib's call, and what makes those of rivals by their names."""

    ours: Call
    rivals: dict[str, Callable[[], Call]]


class Program(NamedTuple):
    """One case. ``make(device)`` makes its calls, ``unit`` is "us" for the host's time of a call
    and "ms" for the GPU's from one call's begin to the next one's, and ``must`` is how many times
    the time of ``rival`` kernlib's may be, at most."""

    name: str
    make: Callable[[str], Calls]
    unit: str
    rival: str = ""
    must: float | None = None
    records: bool = True  # whether gradients are recorded


# Steps.


def step(function: Callable[[], torch.Tensor], leaves: Sequence, grad: torch.Tensor) -> Call:
    """Forward and backward of a function, with its gradient given. The leaves' gradients of the
    step before are dropped, so that none is added to."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        function().backward(grad)

    return run


def sum_step(function: Callable[[], torch.Tensor], leaves: Sequence) -> Call:
    """The same behind ``.sum()``, whose gradient is an expanded number."""

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        function().sum().backward()

    return run


def captured(call: Call) -> Call:
    """The replay of a CUDA graph of a call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> Call:
        graph.replay()
        return call  # which holds the tensors that the graph reads and writes

    return replay


# Timing.


def warmed(call: Call) -> Call:
    """The call, which has run often enough to be timed."""
    for _ in range(1 + WARM_UPS):
        call()
    return call


def host_ms(call: Call, count: int) -> float:
    """Milliseconds of the host a call, of so many behind an empty queue."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e3


def device_ms(call: Call, count: int) -> float:
    """Milliseconds from event to event a call, of so many in a row: the GPU's own, or the host's
    where the GPU waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _synchronize()
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turn(calls: dict[str, Call], clock: Callable, count: int, rounds: int) -> dict[str, float]:
    """The median of each call's times, all of them in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(clock(call, count))
    return {name: statistics.median(some) for name, some in times.items()}


# A row.

OURS = "kernlib"
CLOCKS = {"us": host_ms, "ms": device_ms}


def measure(program: Program, session: Session, device: str = "cuda") -> Row:
    """The row of a case: kernlib's call beside each rival's that runs, and its target."""
    torch.manual_seed(0)
    with nullcontext() if program.records else torch.no_grad():
        ours, rivals = program.make(device)
        calls = {OURS: warmed(ours)}
        for name, make in rivals.items():
            rival = attempt(name, program.name, lambda make=make: warmed(make()))
            if rival is not None:
                calls[name] = rival
        unit = program.unit
        rounds = QUICK_ROUNDS if session.quick else ROUNDS[unit]
        times = in_turn(calls, CLOCKS[unit], CALLS[unit], rounds)
    values = {name: ms * UNITS_PER_MS[unit] for name, ms in times.items()}
    row = Row(program.name, unit, values.pop(OURS), rivals=values)
    if program.must is not None and program.rival in values:
        row.must = program.must * values[program.rival]
    return row
