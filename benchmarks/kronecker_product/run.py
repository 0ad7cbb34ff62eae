"""Products with Kronecker products: kernlib, its floor, and the ways of torch to them.

``python -m benchmarks.kronecker_product --json benchmarks/results/h200/kronecker_product.json``,
and the same with KERNLIB_PORTABLE=1 for the kernels of other GPUs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import kernlib as kl
from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session, attempt
from benchmarks.common.timing import relative_error, sample_rows
from benchmarks.kronecker_product import training
from benchmarks.kronecker_product.problems import KINDS, Problem, exact, problems, tensors
from benchmarks.kronecker_product.rivals import rivals
from benchmarks.service.run import host_us
from kernlib.runtime.devices import arch_of
from kernlib.settings import current

FAMILY = "kronecker_product"
INCLUDED = ("common/math.cuh", *harness.headers(FAMILY))
SOURCE = "\n".join(f'#include "{name}"' for name in INCLUDED)
HOT, HOT_US = (20, ((8, 8),) * 3), 14.0  # rows and factors; microseconds
HOT_NAME = "kronecker_product hot call 20 8^3 fp32"
COMPILERS = 16  # threads that compile kernels before the first case


def descriptor_of(problem: Problem) -> kl.KroneckerProduct:
    left = problem.side == "left"
    shapes = tuple(size[::-1] if left else size for size in problem.sizes)
    return kl.KroneckerProduct(shapes, side=problem.side, precision="fp32")


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    if problem.section == "train":
        return training.measure(problem, session, device)
    x, factors, out = tensors(problem, device)
    descriptor, some = descriptor_of(problem), sample_rows(problem.rows, device)
    wanted = exact(x, factors, problem.side, some)

    def error(found: torch.Tensor) -> float:
        rows = found[some] if problem.side == "right" else found[:, some].mT
        return ((rows.double() - wanted).norm() / wanted.norm()).item()

    def ours(x, out, *factors):
        return kl.run_kernel(descriptor, x, *factors, out=out)

    out.fill_(math.nan)
    off = error(ours(x, out, *factors))
    row = Row(problem.name, "ms", session.time(ours, (x, out, *factors)), *problem.floor())
    row.error, row.must, row.must_error = off, problem.must, KINDS[problem.kind].must_error
    others = {} if problem.is_portable else rivals(problem)  # beside the GPU's own kernels
    for name, call in others.items():
        given = call, session, (x, out, *factors), error
        found = attempt(name, problem.name, partial(_rival, *given))
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found
    return row


def _rival(call: Callable, session: Session, buffers: tuple, error: Callable):
    """Times of a rival, with an ``out`` that it leaves alone: results take as much memory."""

    def run(x, _, *factors):
        return call(x, factors)

    off = error(run(*buffers))
    return session.time(run, buffers), off


def hot_call(session: Session, device: str = "cuda") -> Row:
    """Host time of a product of few rows that records no gradient."""
    problem = Problem("small", *HOT, "fp32")
    x, factors, out = tensors(problem, device)
    descriptor, some = descriptor_of(problem), torch.arange(problem.rows, device=device)

    def timed(call: Callable) -> float:
        return host_us(call, torch.cuda.synchronize, session.quick)

    found = kl.run_kernel(descriptor, x, *factors, out=out)
    off = relative_error(found, exact(x, factors, "right", some))
    row = Row(HOT_NAME, "us", timed(lambda: kl.run_kernel(descriptor, x, *factors, out=out)))
    row.error, row.must = off, HOT_US
    row.rivals["strided"] = timed(lambda: rivals(problem)["strided"](x, factors))
    return row


def compile_ahead(found: Sequence[Problem]) -> None:
    """Compile the kernels of all problems at once, where one by one takes some 0.5 s each."""
    arch = arch_of(torch.cuda.current_device())

    def build(problem: Problem) -> None:
        x, factors, _ = tensors(problem, "meta")
        specs = tuple(t.requires_grad_(problem.section == "train") for t in (x, *factors))
        kl.compile(descriptor_of(problem), archs=arch, specs=specs, workers=1, progress=False)

    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(build, found))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases and print their table. Returns the exit status."""
    every = [found for found in problems() if found.is_portable == current().portable]
    cases = [Case(p.name, partial(measure, p)) for p in every]
    cases += [Case(HOT_NAME, hot_call)] * (not current().portable)
    if torch.cuda.is_available():
        names = {case.name for case in harness.chosen(cases, harness.parse(argv, FAMILY).case)}
        compile_ahead([problem for problem in every if problem.name in names])
    return harness.main(FAMILY, cases, SOURCE, argv)
