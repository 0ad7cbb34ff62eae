"""The k nearest points of each point: kernlib, its floor, torch by blocks, addmm by
blocks and KeOps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import Device, relative_error, sample_rows
from benchmarks.pairwise import by_hand, keops
from benchmarks.pairwise.matmul import BLOCK_ENTRIES
from benchmarks.pairwise.problems import against, exact_distances, floor_ms, least


class Problem(NamedTuple):
    """One case: squared distances to ``k`` of as many points in b as are in a."""

    points: int
    features: int  # D
    k: int = 10
    kind: str = "fp32"
    must: float | None = None

    @property
    def name(self) -> str:
        shape = f"{self.points}x{self.points} D={self.features}"
        return f"kernel_topk k={self.k} {shape} {self.kind}"

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them. Each pair takes a distance and one comparison."""
        return least(self._floor(device, expanded) for expanded in (False, True))

    def _floor(self, device: Device, expanded: bool) -> tuple[float, str]:
        """Of distances on tensor cores, or on the lanes."""
        pairs = float(self.points) ** 2
        slots = 1 + (0 if expanded else 2 * self.features)
        products = self.features if expanded else 0
        moved = self.points * (8 * self.features + 12 * self.k)
        return floor_ms(device, slots * pairs, 0, moved, 2 * products * pairs, self.kind)


PROBLEMS = (
    Problem(100000, 3, must=8.0),
    Problem(100000, 64, must=14.0),
)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b and the values' memory."""
    generator = torch.Generator(device).manual_seed(0)
    shape = problem.points, problem.features
    a, b = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return a, b, torch.empty(problem.points, problem.k, device=device)


def kernel(problem: Problem) -> Callable:
    """``f(a, b, out)`` by kernlib; values and places."""
    return lambda a, b, out: kl.kernel_topk(kl.squared_distance(), a, b, problem.k)


def plain(problem: Problem) -> Callable:
    """``f(a, b, out)`` with torch.cdist and torch.topk, a block of rows at a time."""

    def call(a, b, out):
        step = max(1, BLOCK_ENTRIES // len(b))
        found = [torch.cdist(some, b).topk(problem.k, largest=False) for some in a.split(step)]
        return torch.cat([x.values.square_() for x in found]), torch.cat([x.indices for x in found])

    return call


def rivals(problem: Problem) -> dict[str, Callable]:
    addmm = by_hand.nearest(problem.k)
    return {"torch": plain(problem), "addmm": addmm, **keops.nearest(problem.k)}


def exact(problem: Problem, a, b, rows: torch.Tensor) -> torch.Tensor:
    """Values of some rows in float64."""
    return exact_distances(a[rows], b, 2.0).square().topk(problem.k, largest=False).values


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    rows = sample_rows(problem.points, device)
    wanted = exact(problem, *buffers[:2], rows)

    def error(out) -> float:
        return relative_error(out[0][rows], wanted)

    return against(problem, session, buffers, error, kernel(problem), rivals(problem))


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
