"""Distance and kernel matrices: kernlib, its floor, torch and torch.compile.

``python -m benchmarks.pairwise --json benchmarks/results/h200/pairwise.json``
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

import kernlib as kl
from benchmarks.harness import UNITS_PER_MS, Case, Row, Session, attempt, main
from benchmarks.timing import Device, relative_error, sample_rows

SOURCE = '#include "pairwise/pairwise.cuh"'
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "fp64": torch.float64}
EXACT_ELEMENTS = 1 << 27  # differences in float64 at once: 1 GB, and as much again for powers
COMPILED_K = 64  # above it torch.compile of the plain expression takes minutes

# Of one pair-feature: (issue slots, special-function operations), as in pairwise/terms.cuh.
COSTS = {
    1.0: (2, 0),
    2.0: (2, 0),
    math.inf: (2, 0),
    3.0: (3, 0),
    0.5: (3, 1),
    1.5: (3, 1),
    1.3: (2, 2),
}
FP64_SLOTS = 2  # a float64 operation takes the slots of two

P1 = "cdist p=1 30000x30000x1024 fp32"
LAPLACE_OVER_P1 = 1.03


@dataclass(frozen=True)
class Problem:
    """One case: what is computed, for which shape, and the target it is held to."""

    label: str
    p: float
    m: int
    n: int
    k: int
    dtype: str = "fp32"
    epilogue: str = ""  # "laplace" or "gaussian"
    symmetric: bool = False
    must: float | None = None
    must_error: float | None = None
    unit: str = "ms"

    @property
    def name(self) -> str:
        return f"{self.label} {self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def bandwidth(self) -> float:
        """One that puts the kernel's values near exp(-1) for points of a normal distribution."""
        return math.sqrt(self.k) if self.epilogue == "gaussian" else float(self.k)

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them."""
        pairs = self.m * (self.m + 1) / 2 if self.symmetric else self.m * self.n
        slots, special = COSTS[self.p]
        if self.dtype == "fp64":
            slots *= FP64_SLOTS
        written = self.m * self.n * DTYPES[self.dtype].itemsize
        return device.floor_ms(slots * pairs * self.k, special * pairs * self.k, written)


def cdist(p: float, k: int = 1024, must=None, must_error=None, size=30000, **fields) -> Problem:
    fields = {"must": must, "must_error": must_error, **fields}
    return Problem(f"cdist p={p:g}", float(p), size, size, k, **fields)


PROBLEMS = (
    cdist(1, must=70.0, must_error=2e-7),
    cdist(2, must=70.0, must_error=2e-7),
    cdist(1.3, must=460.0, must_error=1e-6),
    Problem("laplace_l1", 1.0, 30000, 30000, 1024, epilogue="laplace"),
    cdist(1, 32),
    Problem("gaussian", 2.0, 30000, 30000, 32, epilogue="gaussian"),
    cdist(3),
    cdist(0.5),
    cdist(1.5),
    cdist(math.inf),
    Problem("laplace_l1 symmetric", 1.0, 30000, 30000, 1024, epilogue="laplace", symmetric=True),
    cdist(1, dtype="fp16"),
    cdist(1, 256, size=10000, dtype="fp64"),
    cdist(1, 64, size=1000, unit="us"),
    cdist(1, 1023),
)


# Ours.


def kernel(problem: Problem) -> Callable:
    """``f(a, b, out)`` by kernlib."""
    descriptor, arguments = described(problem)
    if problem.symmetric:
        return lambda a, b, out: kl.run_kernel(descriptor, a, out=out, **arguments)
    return lambda a, b, out: kl.run_kernel(descriptor, a, b, out=out, **arguments)


def described(problem: Problem) -> tuple[object, dict]:
    """Descriptor and hyperparameters of a case."""
    if problem.epilogue == "laplace":
        return kl.laplace_l1(symmetric=problem.symmetric), {"bandwidth": problem.bandwidth}
    if problem.epilogue == "gaussian":
        return kl.gaussian(), {"bandwidth": problem.bandwidth}
    if problem.p == 1:
        return kl.l1_distance(), {}
    if problem.p == 2:
        return kl.l2_distance(), {}
    return kl.p_distance(), {"p": problem.p}


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b and out."""
    generator = torch.Generator(device).manual_seed(0)
    kind = {"device": device, "dtype": DTYPES[problem.dtype]}
    a = torch.randn(problem.m, problem.k, generator=generator, **kind)
    b = a if problem.symmetric else torch.randn(problem.n, problem.k, generator=generator, **kind)
    return a, b, torch.empty(problem.m, problem.n, **kind)


# The same in plain torch.


def finish(problem: Problem, distance: torch.Tensor) -> torch.Tensor:
    """The epilogue of a distance."""
    if problem.epilogue == "laplace":
        return torch.exp(-distance / problem.bandwidth)
    if problem.epilogue == "gaussian":
        return torch.exp(-distance.square() / (2 * problem.bandwidth**2))
    return distance


def plain(problem: Problem) -> Callable:
    """``f(a, b, out)`` with torch.cdist in its default mode."""
    return lambda a, b, out: finish(problem, torch.cdist(a, b, p=problem.p))


def compiled(problem: Problem) -> Callable:
    """``f(a, b, out)`` by torch.compile: of cdist for p = 2, where it is a matrix product, and else
    of the difference, which fuses into one kernel and holds no (M, N, K) tensor."""
    expression = plain(problem)
    if problem.p == 1:

        def expression(a, b, out):
            return finish(problem, (a[:, None] - b[None]).abs().sum(-1))

    return torch.compile(expression, dynamic=False)


def rivals(problem: Problem) -> dict[str, Callable]:
    found = {"torch": plain(problem)}
    if problem.k <= COMPILED_K:
        found["torch.compile"] = compiled(problem)
    return found


def exact(problem: Problem, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of the result in float64, by direct differences, a block at a time."""
    block = max(1, EXACT_ELEMENTS // max(1, b.shape[0] * b.shape[1]))
    points, others = a[rows].double(), b.double()
    found = [_distances(part, others, problem.p) for part in points.split(block)]
    return finish(problem, torch.cat(found))


def _distances(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    size = (a[:, None] - b[None]).abs_()
    if math.isinf(p):
        return size.amax(-1)
    return size.pow_(p).sum(-1).pow_(1 / p) if p != 1 else size.sum(-1)


# A row.


def measure(problem: Problem, session: Session) -> Row:
    buffers = tensors(problem)
    rows = sample_rows(problem.m)
    wanted = exact(problem, *buffers[:2], rows)
    ours, error = timed(session, kernel(problem), buffers, rows, wanted)
    floor, bound = problem.floor(Device.current())
    scale = UNITS_PER_MS[problem.unit]
    row = Row(problem.name, problem.unit, ours * scale, floor * scale, bound, error=error)
    row.must, row.must_error = required(problem, session), problem.must_error
    for name, call in rivals(problem).items():
        found = attempt(
            name, problem.name, lambda call=call: timed(session, call, buffers, rows, wanted)
        )
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found[0] * scale, found[1]
    return row


def timed(session: Session, call: Callable, buffers, rows, wanted) -> tuple[float, float]:
    """Milliseconds and error; the call that gives the error warms up the ones that are timed."""
    buffers[2].fill_(math.nan)
    error = relative_error(call(*buffers)[rows], wanted)
    return session.time(call, buffers), error


def required(problem: Problem, session: Session) -> float | None:
    """The target of the fused Laplace as a multiple of this run's time for p = 1."""
    if problem.label != "laplace_l1":
        return problem.must
    if P1 not in session.ours:
        call, buffers = kernel(PROBLEMS[0]), tensors(PROBLEMS[0])
        call(*buffers)
        session.ours[P1] = session.time(call, buffers)
    return LAPLACE_OVER_P1 * session.ours[P1]


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]


if __name__ == "__main__":
    sys.exit(main("pairwise", cases(), SOURCE))
