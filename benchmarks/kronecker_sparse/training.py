"""A training step of one Kronecker-sparse factor: the product and its gradients by x and weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kernlib as kl
from benchmarks.common.harness import Row, Session, attempt
from benchmarks.common.timing import relative_error, sample_rows
from benchmarks.kronecker_sparse.problems import (
    KINDS,
    Problem,
    float32_products,
    pick,
    tensors,
)
from benchmarks.kronecker_sparse.rivals import blocks, einsum
from kernlib.families.kronecker_sparse import reference


def step(multiply: Callable) -> Callable:
    """``f(x, weight, grad)``: y and the gradients by x and weight, all contiguous, of a product
    ``multiply(x, weight)``."""

    def call(x, weight, grad):
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        y = multiply(x, weight)
        by_x, by_weight = torch.autograd.grad(y, (x, weight), grad)
        return y.detach(), by_x.contiguous(), by_weight.contiguous()

    return call


def ours(problem: Problem) -> Callable:
    descriptor = problem.descriptor
    return step(lambda x, weight: kl.run_kernel(descriptor, x, weight))


def gradients(problem: Problem, x, weight, grad, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: some rows of that by x, and all of that by the weight."""
    a, b, c, d = problem.pattern
    points = pick(problem, grad, rows).double()
    by_x = reference.multiply((a, c, b, d), points, weight.double().transpose(1, 2), False)
    wide = (grad.double(), x.double())
    return by_x, reference.weight_gradient(problem.pattern, *wide, problem.batch_last)


def worst_error(problem: Problem, found: tuple, wanted: tuple, rows) -> float:
    """The larger of both gradients' errors; ``found`` are y and they."""
    _, by_x, by_weight = found
    return max(
        relative_error(pick(problem, by_x, rows), wanted[0]), relative_error(by_weight, wanted[1])
    )


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    x, weight, grad = tensors(problem, device)
    grad.normal_(generator=torch.Generator(device).manual_seed(1))
    rows = sample_rows(problem.batch, device)
    by_x, by_weight = gradients(problem, x, weight, grad, rows)

    def timed(call: Callable, held: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
        error = worst_error(problem, call(x, held, grad), (by_x, wanted), rows)
        return session.time(call, (x, held, grad)), error

    with float32_products(problem):
        ms, error = timed(ours(problem), weight, by_weight)
        row = Row(problem.name, "ms", ms, *problem.floor(), error=error)
        row.must_error = KINDS[problem.kind].must_error
        multiply, turned = einsum(problem), blocks(by_weight)
        found = attempt(
            "einsum", problem.name, lambda: timed(step(multiply), blocks(weight), turned)
        )
        if found is not None:
            row.rivals["einsum"], row.rival_errors["einsum"] = found
    return row
