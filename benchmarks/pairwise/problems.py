"""What the pairwise benchmarks share: kinds of numbers, floors, values in float64, timing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.common.harness import UNITS_PER_MS, Row, Session, attempt
from benchmarks.common.timing import VERY_LONG_MS, CudaTimer, Device
from benchmarks.pairwise import keops
from kernlib.settings import current

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
# Operations/s of float32 products on tensor cores, of the rate that an H200 reaches with fp16: at
# the accuracy of fp32 they are three such products, and at that of TF32, which has fp16's digits
# and half its rate, one. Of float64 what 132 multiprocessors have at 1.75 GHz.
TENSOR_RATES = {"fp32": 770e12 / 3, "tf32": 770e12, "fp64": 60e12}
OURS, EAGER = "kernlib", ("torch", "addmm")  # rivals that compile nothing
EXACT_ELEMENTS = 1 << 27  # differences in float64 at once: 1 GB, and as much again for powers


# Floors.


def floor_ms(
    device: Device, slots=0.0, special=0.0, moved=0.0, operations=0.0, kind="fp32"
) -> tuple[float, str]:
    """Milliseconds of issue slots, special functions, bytes, and products on tensor cores: the
    largest of the four, and its name."""
    floors = device.floors_ms(slots, special, moved)
    floors["tensor cores"] = operations / TENSOR_RATES[kind] * 1e3
    bound = max(floors, key=floors.__getitem__)
    return floors[bound], bound


def least(floors: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The floor of what can be done in several ways, on the lanes or on tensor cores."""
    return min(floors, key=lambda floor: floor[0])


# In float64.


def exact_distances(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    """``|a_m - b_n|_p`` in float64, by direct differences, a block of rows at a time."""
    block = max(1, EXACT_ELEMENTS // max(1, b.shape[0] * b.shape[1]))
    others = b.double()
    return torch.cat([_distances(part, others, p) for part in a.double().split(block)])


def _distances(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    size = (a[:, None] - b[None]).abs_()
    if math.isinf(p):
        return size.amax(-1)
    return size.pow_(p).sum(-1).pow_(1 / p) if p != 1 else size.sum(-1)


# Timing.


@contextmanager
def float32_products(kind: str) -> Iterator[None]:
    """torch's own products of float32 as accurate as kernlib's: in TF32 for ``tf32`` alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def timed(
    session: Session,
    call: Callable,
    buffers: tuple,
    error_of: Callable,
    eager: bool = False,
    in_graph: bool = False,
    captured: bool = True,
) -> tuple[float, float]:
    """Milliseconds of ``call(*buffers)``, ``in_graph`` also if it is long or in none if it cannot
    be ``captured``, and ``error_of`` its result; the last buffer is its output. The first call
    gives the error and warms up those that are timed. One that compiles nothing (``eager``) and
    takes seconds is timed itself, and is the only one."""
    buffers[-1].fill_(math.nan)
    if session.timer is None:
        session.timer = CudaTimer()
    results = []
    first = session.timer.swept(lambda *held: results.append(call(*held)), buffers)
    error = error_of(results.pop())
    if eager and first > VERY_LONG_MS:
        return first, error
    return session.time(call, buffers, in_graph, captured), error


def race(row: Row, rivals: dict[str, Callable], measured: Callable) -> Row:
    """The row with time and error of each rival, as ``measured(name, call)`` finds them."""
    for name, call in rivals.items():
        found = attempt(name, row.case, lambda name=name, call=call: measured(name, call))
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found[0] * UNITS_PER_MS[row.unit], found[1]
    return row


def against(
    problem,
    session: Session,
    buffers: tuple,
    error_of: Callable,
    ours: Callable,
    rivals: dict[str, Callable],
    in_graph: bool = False,
) -> Row:
    """The row of a problem with a name, a ``kind``, a ``must`` and a ``floor(device)``: kernlib,
    ``in_graph`` also if it is long, then the rivals, those of EAGER without a second call if they
    take seconds. Beside kernels for other GPUs stands torch alone: the others are known."""

    def measured(name: str, call: Callable) -> tuple[float, float]:
        ways = name in EAGER, in_graph and name == OURS, not name.startswith(keops.NAME)
        return timed(session, call, buffers, error_of, *ways)

    with float32_products(problem.kind):
        time, error = measured(OURS, ours)
        row = Row(problem.name, "ms", time, *problem.floor(Device.current()), error=error)
        row.must = problem.must
        if current().portable:
            rivals = {"torch": rivals["torch"]}
        return race(row, rivals, measured)
