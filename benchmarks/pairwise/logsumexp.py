"""Log-sum-exps of squared distances, without and with the potentials of entropic optimal transport:
kernlib, its floor, torch and addmm by blocks, KeOps and flash-sinkhorn where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import Device, relative_error, sample_rows
from benchmarks.pairwise import keops
from benchmarks.pairwise.matmul import BLOCK_ENTRIES
from benchmarks.pairwise.problems import against, exact_distances, floor_ms, least

COSTS = kl.squared_distance(epilogue=kl.Custom("-s * v", ("s",)))
FLASH = "flash-sinkhorn"
FLASH_MODULE = "flash_sinkhorn.kernels.sinkhorn_flashstyle_sqeuclid"


class Problem(NamedTuple):
    """One case: ``f[m] + log sum_n exp(g[n] - |a[m] - b[n]|^2 / D)``, f and g 0 without
    ``potentials``."""

    points: int
    features: int  # D
    potentials: bool
    kind: str = "fp32"
    must: float | None = None

    @property
    def name(self) -> str:
        words = "kernel_logsumexp potentials" if self.potentials else "kernel_logsumexp"
        return f"{words} {self.points}x{self.points} D={self.features} {self.kind}"

    @property
    def scale(self) -> float:
        return 1 / self.features

    def floor(self, device: Device) -> tuple[float, str]:
        """Milliseconds and what bounds them. Each pair takes a distance, an exponential and its
        sum."""
        return least(self._floor(device, expanded) for expanded in (False, True))

    def _floor(self, device: Device, expanded: bool) -> tuple[float, str]:
        """Of distances on tensor cores, or on the lanes."""
        pairs = float(self.points) ** 2
        slots = 2 + (0 if expanded else 2 * self.features)
        products = self.features if expanded else 0
        moved = 4 * self.points * (2 * self.features + 3)
        return floor_ms(device, slots * pairs, pairs, moved, 2 * products * pairs, self.kind)


SIZES = (50000, 3), (50000, 64), (20000, 256)
PROBLEMS = tuple(Problem(*size, potentials) for potentials in (False, True) for size in SIZES)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """a, b, f, g and the values' memory."""
    generator = torch.Generator(device).manual_seed(0)
    points, features = problem.points, problem.features
    shapes = (points, features), (points, features), (points,), (points,)
    a, b, f, g = (torch.randn(s, generator=generator, device=device) for s in shapes)
    if not problem.potentials:
        f, g = torch.zeros_like(f), torch.zeros_like(g)
    return a, b, f, g, torch.empty_like(f)


def kernel(problem: Problem) -> Callable:
    """``call(a, b, f, g, out)`` by kernlib."""

    def call(a, b, f, g, out):
        named = {"row_potential": f, "col_potential": g} if problem.potentials else {}
        return kl.kernel_logsumexp(COSTS, a, b, s=problem.scale, **named)

    return call


def plain(problem: Problem) -> Callable:
    """The same with torch.cdist and torch.logsumexp, a block of rows at a time."""

    def call(a, b, f, g, out):
        step = max(1, BLOCK_ENTRIES // len(b))
        for some, rows, where in zip(a.split(step), f.split(step), out.split(step), strict=True):
            logs = torch.cdist(some, b).square_().mul_(-problem.scale).add_(g)
            torch.add(logs.logsumexp(1), rows, out=where)
        return out

    return call


def by_addmm(problem: Problem) -> Callable:
    """The same by products: norms are part of the potentials."""

    def call(a, b, f, g, out):
        s, step = problem.scale, max(1, BLOCK_ENTRIES // len(b))
        f, g = f - s * a.square().sum(1), g - s * b.square().sum(1)
        for some, rows, where in zip(a.split(step), f.split(step), out.split(step), strict=True):
            logs = torch.addmm(g, some, b.T, alpha=2 * s)
            torch.add(logs.logsumexp(1), rows, out=where)
        return out

    return call


def by_keops(problem: Problem) -> Callable:
    def call(a, b, f, g, out):
        tensor, root = keops.lazy(a), problem.scale**0.5
        squares = tensor(root * a[:, None]).sqdist(tensor(root * b[None]))
        logs = tensor(g[None, :, None]) - squares if problem.potentials else -squares
        return f + logs.logsumexp(1)[:, 0]

    return call


def by_flash(problem: Problem, tf32: bool) -> Callable:
    """By the step that its solvers consist of, in which norms are part of the potentials."""

    def call(a, b, f, g, out):
        step = importlib.import_module(FLASH_MODULE).flashsinkhorn_lse
        s = problem.scale
        shifted = step(a, b, g - s * b.square().sum(1), 1 / s, allow_tf32=tf32)
        return f - s * (shifted + a.square().sum(1))

    return call


def rivals(problem: Problem) -> dict[str, Callable]:
    ways = {"torch": plain(problem), "addmm": by_addmm(problem)}
    if keops.is_there():
        ways[keops.NAME] = by_keops(problem)
    if importlib.util.find_spec("flash_sinkhorn") is not None:
        ways |= {FLASH: by_flash(problem, False), f"{FLASH} tf32": by_flash(problem, True)}
    return ways


def exact(problem: Problem, a, b, f, g, rows: torch.Tensor) -> torch.Tensor:
    """Values of some rows in float64."""
    logs = g.double() - problem.scale * exact_distances(a[rows], b, 2.0).square()
    return f[rows].double() + logs.logsumexp(1)


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    buffers = tensors(problem, device)
    rows = sample_rows(problem.points, device)
    expected = exact(problem, *buffers[:4], rows)

    def error(out) -> float:
        return relative_error(out[rows], expected)

    return against(problem, session, buffers, error, kernel(problem), rivals(problem))


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
