"""Products with a kernel matrix of one x with itself, and their gradients, forward and backward
together: kernlib, its floor, torch by blocks, formulas by hand and KeOps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import Device, relative_error, sample_rows
from benchmarks.pairwise import by_hand, keops, matmul
from benchmarks.pairwise.problems import against, floor_ms, least

EXACT_ENTRIES = 1 << 24  # of K in float64 at once, times the features


class Problem(NamedTuple):
    """One case: ``K(x, x) v`` and its gradients by some of x, v and the bandwidth."""

    kernel: str  # "gaussian" or "laplace_l1"
    points: int
    features: int  # D
    wanted: tuple[str, ...]  # of "x", "v", "bandwidth"
    must: float | None = None
    kind: str = "fp32"

    @property
    def name(self) -> str:
        shape = f"{self.points}x{self.points} D={self.features} C=1"
        return f"kernel_matmul_grad {self.kernel} {shape} {'+'.join(self.wanted)} fp32"

    @property
    def product(self) -> matmul.Problem:
        """The forward pass."""
        return matmul.Problem(self.kernel, self.points, self.features)

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them. Both passes take a distance and an exponential of each
        pair; the second what the pair is worth to one or both of its points, that times the slope,
        the sums of x, whose terms are a product each or sign, comparison and sum, of v and of the
        bandwidth. Tensor cores have squared distances, and their sums of x."""
        return least(self._floor(device, way) for way in {False, self.kernel == "gaussian"})

    def _floor(self, device: Device, expanded: bool) -> tuple[float, str]:
        pairs, features, by_x = float(self.points) ** 2, self.features, "x" in self.wanted
        term = 1 if self.kernel == "gaussian" else 3
        slots = 2 * (1 + (0 if expanded else 2 * features)) + 1
        slots += 1 + (2 if by_x else 1) + (0 if expanded else term * features * by_x)
        slots += ("v" in self.wanted) + ("bandwidth" in self.wanted)
        products = features * (2 + by_x) * expanded
        return floor_ms(device, slots * pairs, 2 * pairs, operations=2 * products * pairs)


PROBLEMS = (
    Problem("gaussian", 20000, 3, ("x", "v", "bandwidth"), must=0.8),
    Problem("gaussian", 50000, 3, ("x",), must=3.2),
    Problem("gaussian", 50000, 3, ("bandwidth",), must=2.4),
    Problem("laplace_l1", 50000, 10, ("x",), must=10.0),
    Problem("gaussian", 20000, 20, ("x", "v", "bandwidth"), must=1.0),
    Problem("gaussian", 20000, 64, ("x", "v", "bandwidth"), must=1.5),
    Problem("gaussian", 2000, 3, ("x", "v", "bandwidth")),
)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """x, v, the bandwidth, the gradient of the result, and a buffer that nobody reads."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (problem.points, problem.features), (problem.points,), (problem.points,)
    x, v, g = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    bandwidth = torch.tensor(problem.product.bandwidth, device=device)
    for name, leaf in {"x": x, "v": v, "bandwidth": bandwidth}.items():
        leaf.requires_grad_(name in problem.wanted)
    return x, v, bandwidth, g, torch.empty(1, device=device)


def leaves(problem: Problem, x, v, bandwidth) -> list[torch.Tensor]:
    """The tensors whose gradients are wanted."""
    named = {"x": x, "v": v, "bandwidth": bandwidth}
    return [named[name] for name in problem.wanted]


def kernel(problem: Problem) -> Callable:
    """``f(x, v, bandwidth, g, _)`` by kernlib: the gradients."""
    descriptor = problem.product.descriptor

    def call(x, v, bandwidth, g, _):
        # Leaves of this call alone: those of the first are bound to the stream that it ran on.
        given = x, v, bandwidth
        x, v, bandwidth = (t.detach().requires_grad_(t.requires_grad) for t in given)
        product = kl.kernel_matmul(descriptor, x, x, v, bandwidth=bandwidth)
        return torch.autograd.grad(product, leaves(problem, x, v, bandwidth), g)

    return call


def plain(problem: Problem) -> Callable:
    """The same with torch.cdist, torch.matmul and autograd, a block of rows of K at a time, whose
    gradients add up."""

    def call(x, v, bandwidth, g, _):
        wanted = leaves(problem, x, v, bandwidth)
        totals = [torch.zeros_like(t) for t in wanted]
        step = max(1, matmul.BLOCK_ENTRIES // len(x))
        for some, given in zip(x.split(step), g.split(step), strict=True):
            product = values(problem, some, x, bandwidth) @ v
            found = torch.autograd.grad(product, wanted, given)
            for total, part in zip(totals, found, strict=True):
                total += part
        return totals

    return call


def rivals(problem: Problem) -> dict[str, Callable]:
    return {"torch": plain(problem), **by_hand.gradients(problem), **keops.gradients(problem)}


def values(problem: Problem, a, b, bandwidth) -> torch.Tensor:
    """A block of K."""
    distance = torch.cdist(a, b, p=matmul.norm(problem.product))
    if problem.kernel == "gaussian":
        return torch.exp(distance.square() * (-0.5 / bandwidth**2))
    return torch.exp(-distance / bandwidth)


# In float64.


def exact(problem: Problem, x, v, bandwidth, g, rows: torch.Tensor) -> list[torch.Tensor]:
    """The wanted gradients in float64, those of x and v of some rows, by direct differences."""
    x, v, g, bandwidth = (t.detach().double() for t in (x, v, g, bandwidth))
    found = {}
    if "x" in problem.wanted or "v" in problem.wanted:
        difference = x[rows, None] - x
        matrix, slope = _entries(problem, difference, bandwidth)
        worth = (g[rows, None] * v + v[rows, None] * g) * matrix
        found["x"] = (worth[..., None] * slope).sum(1)
        found["v"] = matrix @ g
    if "bandwidth" in problem.wanted:
        step = max(1, EXACT_ENTRIES // x.numel())
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for some, given in zip(x.split(step), g.split(step), strict=True):
            difference = some[:, None] - x
            matrix, slope = _entries(problem, difference, bandwidth)
            # K is one of quotients by the bandwidth.
            by_bandwidth = -(slope * difference).sum(-1) / bandwidth * matrix
            total += given @ (by_bandwidth @ v)
        found["bandwidth"] = total
    return [found[name] for name in problem.wanted]


def _entries(problem: Problem, difference, bandwidth) -> tuple[torch.Tensor, torch.Tensor]:
    """K and the derivatives of its logarithm by the first point."""
    if problem.kernel == "gaussian":
        slope = -difference / bandwidth**2
        return torch.exp(0.5 * (slope * difference).sum(-1)), slope
    slope = -difference.sign() / bandwidth
    return torch.exp((slope * difference).sum(-1)), slope


# A row.


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    rows = sample_rows(problem.points, device)
    wanted = exact(problem, *buffers[:4], rows)

    def error(found) -> float:
        pairs = zip(problem.wanted, found, wanted, strict=True)
        return max(relative_error(t if n == "bandwidth" else t[rows], w) for n, t, w in pairs)

    # Autograd's own work on the host, 0.4 ms, would show in calls of 1 ms.
    ways = kernel(problem), rivals(problem)
    return against(problem, session, buffers, error, *ways, in_graph=True)


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
