"""Products with formulas of pairs, and KeOps. A target is so many times the time of kernlib's own
Gaussian of as many features, in the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import Device, relative_error, sample_rows
from benchmarks.pairwise import keops
from benchmarks.pairwise.problems import against, exact_distances, floor_ms, least, timed

HALF = 8  # features of each of two kernels
VALUES = kl.squared_distance(
    epilogue=kl.Custom(
        "exp(-v / (s_i * s_j)) * w_j", axes={"s_i": "row", "s_j": "col", "w_j": "col"}
    )
)
FIRST, SECOND = kl.gaussian(features=range(HALF)), range(HALF, 2 * HALF)
PRODUCTS = {
    "gaussian*gaussian": FIRST * kl.gaussian(features=SECOND),
    "gaussian*matern52": FIRST * kl.matern52(features=SECOND),
}


class Problem(NamedTuple):
    """One case: a formula, of as many rows as columns, and ``times`` the Gaussian's time."""

    formula: str  # "custom row+col", or one of PRODUCTS
    points: int
    features: int
    times: float
    kind: str = "fp32"
    must: float | None = None  # which a run has

    @property
    def name(self) -> str:
        of = f"{HALF}+{HALF}" if self.formula in PRODUCTS else self.features
        return f"kernel_matmul {self.formula} {self.points}x{self.points} D={of} {self.kind}"

    @property
    def bandwidth(self) -> float:
        return self.features**0.5

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them: distances, two operations more, an exponential. Those
        of one Gaussian are products of matrices."""
        ways = (False, True) if self.formula == "gaussian*gaussian" else (False,)
        return least(self._floor(device, expanded) for expanded in ways)

    def _floor(self, device: Device, expanded: bool) -> tuple[float, str]:
        pairs = float(self.points) ** 2
        moved = 4 * self.points * (2 * self.features + 4)
        slots = 3 + (0 if expanded else 2 * self.features)
        products = 2 * self.features * pairs if expanded else 0.0
        return floor_ms(device, slots * pairs, pairs, moved, products, self.kind)


PROBLEMS = (
    Problem("custom row+col", 50000, 3, 1.25),
    Problem("gaussian*gaussian", 50000, 2 * HALF, 1.15),
    Problem("gaussian*matern52", 50000, 2 * HALF, 1.7),
)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b, v, s_i, s_j, w_j and out."""
    generator = torch.Generator(device).manual_seed(0)
    points, n = (problem.points, problem.features), problem.points
    a, b = (torch.randn(points, generator=generator, device=device) for _ in range(2))
    v, w = (torch.randn(n, generator=generator, device=device) for _ in range(2))
    s, t = (torch.rand(n, generator=generator, device=device) + 0.5 for _ in range(2))
    return a, b, v, s, t, w, torch.empty_like(v)


def kernel(problem: Problem) -> Callable:
    """``f(a, b, v, s, t, w, out)`` by kernlib."""
    if problem.formula not in PRODUCTS:
        return lambda a, b, v, s, t, w, out: kl.kernel_matmul(
            VALUES, a, b, v, out=out, s_i=s, s_j=t, w_j=w
        )
    width, descriptor = problem.bandwidth, PRODUCTS[problem.formula]
    return lambda a, b, v, s, t, w, out: kl.kernel_matmul(
        descriptor, a, b, v, out=out, bandwidth_1=width, bandwidth_2=width
    )


def gaussian(problem: Problem) -> Callable:
    """kernlib's Gaussian of as many features: what a formula's time is compared with."""
    width, descriptor = problem.bandwidth, kl.gaussian()
    return lambda a, b, v, s, t, w, out: kl.kernel_matmul(
        descriptor, a, b, v, out=out, bandwidth=width
    )


def by_keops(problem: Problem) -> Callable:
    def call(a, b, v, s, t, w, out):
        tensor = keops.lazy(a)
        rows, columns = tensor(s[:, None, None]), tensor(t[None, :, None])
        squares = tensor(a[:, None]).sqdist(tensor(b[None]))
        scores = (-squares / (rows * columns)).exp() * tensor(w[None, :, None])
        return (scores @ v[:, None])[:, 0]

    return call


def rivals(problem: Problem) -> dict[str, Callable]:
    if keops.is_there() and problem.formula not in PRODUCTS:
        return {keops.NAME: by_keops(problem)}
    return {}


def exact(problem: Problem, a, b, v, s, t, w, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of the product in float64."""
    if problem.formula not in PRODUCTS:
        squares = exact_distances(a[rows], b, 2.0).square_()
        scores = (-squares / (s[rows, None].double() * t.double())).exp_() * w.double()
        return scores @ v.double()
    first, second = (
        exact_distances(a[rows][:, at], b[:, at], 2.0) / problem.bandwidth
        for at in (slice(HALF), slice(HALF, None))
    )
    scores = (-0.5 * first.square()).exp_()
    if problem.formula.endswith("gaussian"):
        return (scores * (-0.5 * second.square()).exp_()) @ v.double()
    u = 5**0.5 * second
    return (scores * (1 + u + u * u / 3) * (-u).exp()) @ v.double()


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    rows = sample_rows(problem.points, device)
    expected = exact(problem, *buffers[:-1], rows)

    def error(out) -> float:
        return relative_error(out[rows], expected)

    row = against(problem, session, buffers, error, kernel(problem), rivals(problem))
    plain, _ = timed(session, gaussian(problem), buffers, lambda out: 0.0)
    row.must = problem.times * plain
    return row


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
