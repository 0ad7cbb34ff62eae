"""Gradients of distances by the points, weighted and summed: kernlib, its floor, and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import Device, sample_rows
from benchmarks.pairwise.problems import float32_products, floor_ms, race, timed

MUST_ERROR = 1e-4  # of the sum of absolute terms
FEATURE_STEP = 9  # of the sampled features, so that 8 of 64 are left, the first and last among them
TENSOR_OUTPUTS = 8  # from which on sums over the points are products for tensor cores

# Of one (k, n, m): (issue slots, special-function operations) of the weight that the outputs share.
# For p = 1 a difference, its sign and one more; for p = 1.5 a square root as well; none for p = 2,
# of which the differences of products of matrices remain.
COSTS = {1.0: (3, 0), 1.5: (4, 1), 2.0: (0, 0)}


class Problem(NamedTuple):
    """One case: ``out[o,n,m] = sum_k c[o,k] a[k,m] sign(v) |v|^(p-1)`` with
    ``v = d[n,m] - b[n,k]``."""

    p: float
    outputs: int  # O
    must: float | None = None
    points: int = 10000  # K
    queries: int = 10000  # M
    features: int = 768  # N

    @property
    def name(self) -> str:
        shape = f"{self.points}x{self.queries}x{self.features}"
        return f"cdist_grad p={self.p:g} {shape} O={self.outputs} fp32"

    @property
    def elements(self) -> float:
        return float(self.points * self.queries * self.features)

    @property
    def moved(self) -> int:
        """Bytes of all tensors."""
        k, m, n, outputs = self.points, self.queries, self.features, self.outputs
        return 4 * (k * m + n * k + outputs * k + n * m + outputs * n * m)

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them."""
        slots, special = (cost * self.elements for cost in COSTS[self.p])
        wide = self.outputs >= TENSOR_OUTPUTS or self.p == 2
        operations = 2 * self.outputs * self.elements if wide else 0
        return floor_ms(device, slots, special, self.moved, operations)


PROBLEMS = (
    Problem(1.0, 16, must=45.0),
    Problem(1.5, 16, must=75.0),
    Problem(2.0, 16, must=25.0),
    Problem(1.0, 1, must=14.0),
    Problem(2.0, 1, must=6.0),
)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a (K, M), b (N, K), c (O, K), d (N, M) and out (O, N, M)."""
    generator = torch.Generator(device).manual_seed(0)
    k, m, n, outputs = problem.points, problem.queries, problem.features, problem.outputs
    shapes = ((k, m), (n, k), (outputs, k), (n, m))
    made = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
    return (*made, torch.empty(outputs, n, m, device=device))


def kernel(problem: Problem) -> Callable:
    """``f(a, b, c, d, out)`` by kernlib."""
    return lambda a, b, c, d, out: kl.cdist_grad(a, b, c, d, out=out, p=problem.p)


# The same in plain torch.


def plain(problem: Problem) -> Callable:
    """``f(a, b, c, d, out)``: a loop over the features, or for p = 2 products of matrices."""
    if problem.p == 2:
        return by_products

    def loop(a, b, c, d, out):
        for n in range(len(d)):
            out[:, n] = c @ weights(a, d[n] - b[n][:, None], problem.p)
        return out

    return loop


def weights(a: torch.Tensor, v: torch.Tensor, p: float) -> torch.Tensor:
    """``a sign(v) |v|^(p-1)``."""
    return a * v.sign() if p == 1 else a * v.sign() * v.abs() ** (p - 1)


def by_products(a, b, c, d, out):
    """For p = 2, where the sum over k is ``d (c a) - (c b) a``."""
    torch.matmul((c[:, None] * b).flatten(0, 1), a, out=out.view(-1, a.shape[1]))
    return torch.sub((c @ a)[:, None] * d, out, out=out)


# In float64.


class Sample(NamedTuple):
    """Some entries of the result: where, their values, and the sums of absolute terms."""

    features: torch.Tensor
    queries: torch.Tensor
    values: torch.Tensor  # (O, features, queries)
    sizes: torch.Tensor


def exact(problem: Problem, a, b, c, d) -> Sample:
    """The result at sampled features and queries, in float64."""
    features = sample_rows(problem.features, a.device)[::FEATURE_STEP]
    queries = sample_rows(problem.queries, a.device)
    weight, coefficients = a[:, queries].double(), c.double()
    values, sizes = [], []
    for n in features.tolist():
        difference = d[n, queries].double() - b[n].double()[:, None]
        terms = weights(weight, difference, problem.p)
        values.append(coefficients @ terms)
        sizes.append(coefficients.abs() @ terms.abs())
    return Sample(features, queries, torch.stack(values, 1), torch.stack(sizes, 1))


def largest_error(result: torch.Tensor, sample: Sample) -> float:
    """The largest difference from float64, over the sum of that entry's absolute terms. Raises
    ValueError when it is not a number."""
    found = result[:, sample.features][:, :, sample.queries].double()
    worst = ((found - sample.values).abs() / sample.sizes).max().item()
    if not math.isfinite(worst):
        raise ValueError(f"the largest error against float64 is {worst}")
    return worst


# A row.


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    sample = exact(problem, *buffers[:4])

    def measured(name: str, call: Callable) -> tuple[float, float]:
        eager = name == "torch"
        return timed(session, call, buffers, lambda out: largest_error(out, sample), eager)

    with float32_products("fp32"):
        ours, error = measured("kernlib", kernel(problem))
        row = Row(problem.name, "ms", ours, *problem.floor(Device.current()), error=error)
        row.must, row.must_error = problem.must, MUST_ERROR
        return race(row, {"torch": plain(problem)}, measured)


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
