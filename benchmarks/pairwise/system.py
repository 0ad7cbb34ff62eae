"""Kernel systems solved without the matrix: kernlib beside the products that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session
from benchmarks.common.timing import CudaTimer, relative_error
from benchmarks.pairwise import matmul
from benchmarks.pairwise.problems import float32_products, race

MOST = 1.15  # times the iterations' products that a solution may take


class Problem(NamedTuple):
    """One case: ``(K(x, x) + regularization I) w = y`` to ``tol``."""

    points: int
    features: int  # D
    regularization: float = 1.0
    tol: float = 1e-6

    @property
    def name(self) -> str:
        return f"solve_kernel gaussian {self.points} D={self.features} fp32"

    @property
    def product(self) -> matmul.Problem:
        """What each iteration multiplies by."""
        return matmul.Problem("gaussian", self.points, self.features)


PROBLEMS = (Problem(60000, 64),)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, torch.Tensor]:
    """x and y."""
    x, _, y, _ = matmul.tensors(problem.product, device)
    return x, y


class Solver:
    """Solves one problem by conjugate gradients with the same preconditioner each time."""

    def __init__(self, problem: Problem):
        self.problem, self.iterations = problem, 0

    def _arguments(self, x: torch.Tensor) -> dict:
        return {
            "rank": math.ceil(2 * math.sqrt(len(x))),
            "regularization": self.problem.regularization,
            "bandwidth": self.problem.product.bandwidth,
            "generator": torch.Generator(x.device).manual_seed(0),
        }

    def whole(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """By kernlib, the preconditioner's making with it."""
        arguments, tol = self._arguments(x), self.problem.tol
        found = kl.linalg.solve_kernel(kl.gaussian(), x, y, tol=tol, **arguments)
        self.iterations = found.iterations
        return found.x

    def preconditioner(self, x: torch.Tensor, y: torch.Tensor) -> Callable:
        """Its making, which a solution's time is taken without."""
        return kl.linalg.nystrom(kl.gaussian(), x, **self._arguments(x))

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The same iterations over torch's products, a block of rows of K at a time."""
        multiply, mu = matmul.plain(self.problem.product), self.problem.regularization

        def product(v: torch.Tensor) -> torch.Tensor:
            return multiply(x, x, v, torch.empty_like(v)).add_(v, alpha=mu)

        inverse, tol = self.preconditioner(x, y), self.problem.tol
        return kl.linalg.conjugate_gradient(product, y, preconditioner=inverse, tol=tol).x


def residual(problem: Problem, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> float:
    """``||y - (K + regularization I) w|| / ||y||`` in float64."""
    wide = x.double(), x.double(), w.double()
    bandwidth = problem.product.bandwidth
    found = kl.kernel_matmul(kl.gaussian(), *wide, bandwidth=bandwidth)
    return relative_error(found.add_(wide[2], alpha=problem.regularization), y.double())


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    """Without the making of the preconditioner on either side; the floor is what the iterations'
    products take."""
    if session.timer is None:
        session.timer = CudaTimer()
    x, y = tensors(problem, device)
    solver = Solver(problem)

    def time(call: Callable) -> float:
        call(x, y)
        return session.timer.swept(call, (x, y))

    made = time(solver.preconditioner)

    def measured(name: str, call: Callable) -> tuple[float, float]:
        error = residual(problem, x, y, call(x, y))
        return session.timer.swept(call, (x, y)) - made, error

    with float32_products("fp32"):
        ours, error = measured("kernlib", solver.whole)
        product = matmul.kernel(problem.product)
        buffers = x, x, y, torch.empty_like(y)
        product(*buffers)
        floor = session.time(product, buffers) * solver.iterations
        row = Row(problem.name, "ms", ours, floor, "its products", error=error)
        row.must, row.must_error = MOST * floor, problem.tol
        return race(row, {"torch": solver.plain}, measured)


def cases() -> list[Case]:
    return [Case(p.name, lambda session, p=p: measure(p, session)) for p in PROBLEMS]
