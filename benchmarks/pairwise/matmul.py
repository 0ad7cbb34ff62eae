"""Products with a kernel matrix that is not stored: kernlib, its floor, torch by blocks,
formulas by hand and KeOps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session, attempt
from benchmarks.common.timing import Device, relative_error, sample_rows
from benchmarks.pairwise import by_hand, keops
from benchmarks.pairwise.problems import (
    DTYPES,
    against,
    exact_distances,
    float32_products,
    floor_ms,
    least,
)

BLOCK_ENTRIES = 1 << 28  # of K that torch holds at once: 1 GB
# Of a float64 value: slots of an operation, and operations of an exponential, which no unit has.
FP64_SLOTS, FP64_EXPONENTIAL = 2, 14
CONSTANT_BYTES = 64 << 20  # that a product may hold whatever the number of points: one block of K


class Problem(NamedTuple):
    """One case: ``K(a, b) v`` of as many points in a as in b."""

    kernel: str  # "gaussian" or "laplace_l1"
    points: int
    features: int  # D
    kind: str = "fp32"
    columns: int = 1  # C
    must: float | None = None

    @property
    def name(self) -> str:
        return f"{self.place} {self.kind}"

    @property
    def place(self) -> str:
        """The name without the kind of numbers."""
        columns = "" if self.columns == 1 else f" C={self.columns}"
        shape = f"{self.points}x{self.points} D={self.features}{columns}"
        return f"kernel_matmul {self.kernel} {shape}"

    @property
    def bandwidth(self) -> float:
        """One that puts the kernel's values near exp(-1) for points of a normal distribution."""
        return math.sqrt(self.features) if self.kernel == "gaussian" else float(self.features)

    @property
    def descriptor(self) -> kl.Pairwise:
        make = kl.gaussian if self.kernel == "gaussian" else kl.laplace_l1
        return make(precision="tf32" if self.kind == "tf32" else None)

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them. Each pair takes a distance, of which tensor cores have
        only the squared one, an exponential and a product with a row of v."""
        ways = itertools.product({False, self.kernel == "gaussian"}, (False, True))
        return least(self._floor(device, *way) for way in ways)

    def _floor(self, device: Device, expanded: bool, wide: bool) -> tuple[float, str]:
        """Of distances and of the product with v on tensor cores, or on the lanes."""
        pairs = float(self.points) ** 2
        slots = 1 + (0 if expanded else 2 * self.features) + (0 if wide else self.columns)
        products = (self.features if expanded else 0) + (self.columns if wide else 0)
        moved = 2 * DTYPES[self.kind].itemsize * self.points * (self.features + self.columns)
        special = pairs
        if self.kind == "fp64":
            slots, special = FP64_SLOTS * (slots + FP64_EXPONENTIAL), 0.0
        return floor_ms(device, slots * pairs, special, moved, 2 * products * pairs, self.kind)

    @property
    def most_bytes(self) -> int:
        """The memory that a product may take besides its tensors: a constant, and twice that of the
        points, for copies that tensor cores multiply. K itself has 40 GB for 100000 points."""
        return CONSTANT_BYTES + 2 * 8 * self.points * self.features


PROBLEMS = (
    Problem("gaussian", 100000, 3, must=6.0),
    Problem("gaussian", 100000, 64, must=14.0),
    Problem("gaussian", 100000, 64, "tf32", must=6.0),
    Problem("gaussian", 30000, 784, must=15.0),
    Problem("gaussian", 30000, 784, "tf32", must=6.5),
    Problem("gaussian", 100000, 3, columns=64, must=8.0),
    Problem("gaussian", 50000, 10, columns=10, must=1.7),
    Problem("gaussian", 20000, 64, columns=64, must=0.65),
    Problem("laplace_l1", 30000, 64),
    Problem("gaussian", 20000, 64, "fp64"),
    Problem("gaussian", 20000, 64, "fp64", columns=8),
    Problem("gaussian", 20000, 3, "fp64"),
    Problem("gaussian", 2000, 3),
    Problem("gaussian", 2000, 10, columns=10),
    Problem("gaussian", 2000, 3, "fp64"),
)
MEMORY = PROBLEMS[1]
MEMORY_NAME = f"{MEMORY.place} memory"


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b, v and out; v is a vector where there is one column."""
    generator = torch.Generator(device).manual_seed(0)
    points, columns = (problem.points, problem.features), (problem.points, problem.columns)
    shapes = points, points, columns[: 1 if problem.columns == 1 else 2]
    dtype = DTYPES[problem.kind]
    made = [torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes]
    return (*made, torch.empty_like(made[2]))


def kernel(problem: Problem) -> Callable:
    """``f(a, b, v, out)`` by kernlib."""
    descriptor, bandwidth = problem.descriptor, problem.bandwidth
    return lambda a, b, v, out: kl.kernel_matmul(descriptor, a, b, v, out=out, bandwidth=bandwidth)


# The same in plain torch.


def plain(problem: Problem) -> Callable:
    """``f(a, b, v, out)`` with torch.cdist and torch.matmul, a block of rows of K at a time."""

    def call(a, b, v, out):
        step = max(1, BLOCK_ENTRIES // len(b))
        for some, where in zip(a.split(step), out.split(step), strict=True):
            torch.matmul(finish(problem, torch.cdist(some, b, p=norm(problem))), v, out=where)
        return out

    return call


def rivals(problem: Problem) -> dict[str, Callable]:
    return {"torch": plain(problem), **by_hand.products(problem), **keops.products(problem)}


def norm(problem: Problem) -> float:
    return 2.0 if problem.kernel == "gaussian" else 1.0


def finish(problem: Problem, distance: torch.Tensor) -> torch.Tensor:
    """The kernel of a distance, in its place."""
    if problem.kernel == "gaussian":
        return distance.square_().mul_(-0.5 / problem.bandwidth**2).exp_()
    return distance.mul_(-1 / problem.bandwidth).exp_()


def exact(problem: Problem, a, b, v, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of the product in float64."""
    return finish(problem, exact_distances(a[rows], b, norm(problem))) @ v.double()


# A row.


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    rows = sample_rows(problem.points, device)
    wanted = exact(problem, *buffers[:3], rows)

    def error(out) -> float:
        return relative_error(out[rows], wanted)

    return against(problem, session, buffers, error, kernel(problem), rivals(problem))


def peak_bytes(call: Callable, buffers: tuple) -> int:
    """The most that torch holds during a call more than before it; the first one, which may load
    kernels, is not counted."""
    call(*buffers)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(*buffers)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_memory(session: Session) -> Row:
    buffers = tensors(MEMORY)
    with float32_products(MEMORY.kind):
        row = Row(MEMORY_NAME, "bytes", max(1, peak_bytes(kernel(MEMORY), buffers)))
        row.must = MEMORY.most_bytes
        found = attempt("torch", row.case, lambda: peak_bytes(plain(MEMORY), buffers))
    if found is not None:
        row.rivals["torch"] = found
    return row


def cases() -> list[Case]:
    times = [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
    return [*times, Case(MEMORY_NAME, measure_memory)]
