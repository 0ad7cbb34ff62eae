"""A training step of a product with a Kronecker product: the product, and its gradients by x and by
all factors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import kernlib as kl
from benchmarks.common.harness import Row, Session, attempt
from benchmarks.common.timing import relative_error
from benchmarks.kronecker_product.problems import KINDS, Problem, tensors
from benchmarks.kronecker_product.rivals import rivals
from kernlib.families.kronecker_product import reference

SHARE = 3.2  # of the product's own time, that it may take with its gradients


def step(multiply: Callable) -> Callable:
    """``f(x, grad, *factors)``: the gradients by x and factors of a product ``multiply(x,
    factors)``."""

    def call(x, grad, *factors):
        leaves = [t.detach().requires_grad_() for t in (x, *factors)]
        return torch.autograd.grad(multiply(leaves[0], leaves[1:]), leaves, grad)

    return call


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    x, factors, grad = tensors(problem, device)
    grad.normal_(generator=torch.Generator(device).manual_seed(1))
    wanted = step(partial(reference.multiply, axis=-1))(*(t.double() for t in (x, grad, *factors)))

    def timed(call: Callable) -> tuple[float, float]:
        found = call(x, grad, *factors)
        error = max(relative_error(a, b) for a, b in zip(found, wanted, strict=True))
        return session.time(call, (x, grad, *factors)), error

    def product(x, factors):
        return kl.kron_matmul(x, factors, precision="fp32")

    milliseconds, error = timed(step(product))
    row = Row(problem.name, "ms", milliseconds, *problem.floor(), error=error)
    alone = session.time(lambda x, grad, *factors: product(x, factors), (x, grad, *factors))
    row.must, row.must_error = SHARE * alone, KINDS[problem.kind].must_error
    for name, multiply in rivals(problem).items():
        found = attempt(name, problem.name, partial(timed, step(multiply)))
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found
    return row
