"""Block-sparse products and softmax: kernlib, its floor, the dense ones, torch's BSR, blksprs.
``scaled.py`` has those of float8, ``attention.py`` those of attention.

``python -m benchmarks.blocksparse --json benchmarks/results/h100/blocksparse.json``, and the same
with KERNLIB_PORTABLE=1 for the kernels of other GPUs. A whole run takes some five minutes, of which
tuning torch's BSR takes one, and is done where half of a matrix is stored alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import kernlib as kl
from benchmarks.blocksparse import attention, scaled
from benchmarks.blocksparse import problems as every
from benchmarks.blocksparse.problems import (
    Problem,
    dense,
    exact,
    layout_of,
    problems,
    sampled,
    tensors,
)
from benchmarks.blocksparse.rivals import Way, dense_product, ours, product, rivals
from benchmarks.common import harness
from benchmarks.common.harness import Case, Row, Session, attempt
from benchmarks.common.timing import relative_error
from benchmarks.kronecker_sparse.host import milliseconds
from benchmarks.service.run import host_us
from kernlib import blocksparse
from kernlib.blocksparse import Layout
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.devices import arch_of
from kernlib.settings import current

FAMILY = "blocksparse"
INCLUDED = ("common/math.cuh", *harness.headers(FAMILY))
SOURCE = "\n".join(f'#include "{name}"' for name in INCLUDED)
COMPILERS = 16  # threads that compile kernels before the first case

# n, block, heads and the microseconds that making a layout of a mask may take.
LAYOUTS = ((4096, 64, None, 25.0), (4096, 16, None, None), (8192, 16, None, None),
           (4096, 64, 16, None))  # fmt: skip
LAYOUT_DENSITY = 0.25
HOT, HOT_US = Problem("hot", "dsd", 256, 32, 0.5, "fp16", 64), 14.0
HOT_NAME = "blocksparse hot call dsd 256 N=64 block=32 fp16"
COMPILE_NAME, COMPILE_MS = "blocksparse compile", 500.0


# A row.


def measure(problem: Problem, session: Session, device: str = "cuda") -> Row:
    if problem.trains:
        return measure_training(problem, session, device)
    layout = layout_of(problem, device)
    operands = tensors(problem, layout, device)
    wanted = exact(problem, layout, *operands[:-1])

    def timed(way: Way) -> tuple[float, float]:
        found = way.read(way.call(*way.buffers))
        error = relative_error(sampled(problem, layout, found), wanted)
        del found
        return session.time(way.call, way.buffers), error

    operands[-1].fill_(math.nan)
    ms, error = timed(ours(problem, layout, operands))
    row = Row(problem.name, "ms", ms, *problem.floor(), error=error)
    beside(row, problem, rivals(problem, layout, operands), lambda make: timed(make()))
    row.must = must(problem, row, session, lambda: plain_ms(problem, session, device))
    return row


def beside(row: Row, problem: Problem, others: dict[str, Callable], timed: Callable) -> None:
    """The rivals' times and errors, and the error that ours may have beside cuBLAS's."""
    for name, make in others.items():
        found = attempt(name, problem.name, partial(timed, make))
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found
    if "cublas" in row.rival_errors:
        row.must_error = every.ERROR_SHARE * row.rival_errors["cublas"]


def must(problem: Problem, row: Row, session: Session, plain: Callable[[], float]) -> float | None:
    """Milliseconds that the case may take; ``plain`` measures it without transposes."""
    if problem.section == "transposed":
        known = session.ours.get(problem.plain.name)
        return every.TRANSPOSED_SHARE * (plain() if known is None else known)
    if problem.section == "diagonal":
        found = [ms for name, ms in row.rivals.items() if name.startswith("grouped_mm")]
        return every.GROUPED_SHARE * min(found) if found else None
    most = problem.must()
    is_faster = (problem.block, problem.density) in every.FASTER and problem.section == "table"
    if most is not None and is_faster and "cublas" in row.rivals:
        return min(most, row.rivals["cublas"])
    return most


def plain_ms(problem: Problem, session: Session, device: str) -> float:
    layout = layout_of(problem.plain, device)
    way = ours(problem.plain, layout, tensors(problem.plain, layout, device))
    way.call(*way.buffers)
    return session.time(way.call, way.buffers)


# Gradients.


def step(multiply: Callable) -> Callable:
    """``f(a, b, grad)``: a product, and its gradients by both operands."""

    def call(a, b, grad):
        leaves = [t.detach().requires_grad_() for t in (a, b)]
        return torch.autograd.grad(multiply(*leaves), leaves, grad)

    return call


def measure_training(problem: Problem, session: Session, device: str = "cuda") -> Row:
    layout = layout_of(problem, device)
    a, b, grad = tensors(problem, layout, device)
    grad.normal_(generator=torch.Generator(device).manual_seed(1))
    whole = dense(problem, layout, a, b)
    in_float64 = step(dense_product(problem))(*(t.double() for t in (*whole, grad)))
    wanted = stored(problem, layout, in_float64)
    del in_float64

    def timed(call: Callable, buffers: tuple, is_dense: bool) -> tuple[float, float]:
        found = call(*buffers)
        found = stored(problem, layout, found) if is_dense else found
        error = max(relative_error(x, y) for x, y in zip(found, wanted, strict=True))
        return session.time(call, buffers), error

    multiply = product(problem, layout)
    ms, error = timed(step(multiply), (a, b, grad), False)
    row = Row(problem.name, "ms", ms, *problem.floor(), error=error)
    row.must = every.TRAIN_SHARE * session.time(lambda a, b, grad: multiply(a, b), (a, b, grad))
    others = {"cublas": lambda: (step(dense_product(problem)), (*whole, grad), True)}
    beside(row, problem, others, lambda make: timed(*make()))
    return row


def stored(problem: Problem, layout: Layout, pair: Sequence[torch.Tensor]) -> tuple:
    """Of gradients by matrices that are laid out those of the stored blocks."""
    letters = zip(pair, problem.mode[1:], strict=True)
    return tuple(layout.to_blocks(t) if letter == "s" else t for t, letter in letters)


# Layouts, the host's time, and compile times.


def layout_name(n: int, block: int, heads: int | None) -> str:
    several = f" heads={heads}" if heads else ""
    return f"blocksparse layout {n}/{block}{several} from a mask on the device"


def measure_layout(
    n: int, block: int, heads: int | None, must: float | None, session: Session, device="cuda"
) -> Row:
    """The GPU's time of writing the contents of a layout anew, in a graph: nothing there waits."""
    first, second = (
        blocksparse.random(n, n, block, LAYOUT_DENSITY, heads, seed, device) for seed in (0, 1)
    )
    mask = second.mask()
    first.update_(mask)
    if not torch.equal(first.mask(), mask):
        raise ValueError("the layout is another one")
    us = session.time(first.update_, (mask,)) * harness.UNITS_PER_MS["us"]
    return Row(layout_name(n, block, heads), "us", us, must=must)


def hot_call(session: Session, device: str = "cuda") -> Row:
    """Host time of a small product that records no gradient."""
    layout = layout_of(HOT, device)
    a, b, out = tensors(HOT, layout, device)
    descriptor, run_kernel = descriptor_of(HOT), kl.run_kernel
    whole = layout.to_dense(a)

    def timed(call: Callable) -> float:
        return host_us(call, torch.cuda.synchronize, session.quick)

    found = run_kernel(descriptor, layout, a, b, out=out)
    error = relative_error(sampled(HOT, layout, found), exact(HOT, layout, a, b))
    us = timed(lambda: run_kernel(descriptor, layout, a, b, out=out))
    row = Row(HOT_NAME, "us", us, error=error, must=HOT_US)
    row.rivals["cublas"] = timed(lambda: torch.matmul(whole, b, out=out))
    return row


def descriptor_of(problem: Problem) -> BlockSparseMatmul:
    precision = "fp32" if problem.kind == "fp32" else None
    return BlockSparseMatmul(problem.mode, **problem.flags, precision=precision)


def stand_ins(problem: Problem) -> tuple:
    """The operands of a call, on meta."""
    layout = layout_of(problem, "meta")
    *operands, _ = tensors(problem, layout, "meta")
    return layout, *(t.requires_grad_(problem.trains) for t in operands)


def kernels(arch: str) -> list[KernelSpec]:
    """Every kernel of the products, once."""
    from kernlib import ahead

    chosen = [p for p in problems() if p.mode != "softmax" and not p.is_portable]
    found = [
        spec
        for problem in chosen
        for spec in ahead.specs(descriptor_of(problem), arch, stand_ins(problem), {})
    ]
    return list({spec.canonical(): spec for spec in found}.values())


def compile_times(session: Session) -> dict[str, float]:
    """Maximum and median of NVRTC's milliseconds, one kernel after the other, once a session."""
    maximum, median = f"{COMPILE_NAME} maximum", f"{COMPILE_NAME} median"
    if maximum not in session.ours:
        arch = arch_of(torch.cuda.current_device())
        found = kernels(arch)
        milliseconds(found[0], arch)  # loads NVRTC
        times = [milliseconds(spec, arch) for spec in found]
        session.ours |= {maximum: max(times), median: statistics.median(times)}
    return session.ours


def compile_row(which: str, session: Session) -> Row:
    name = f"{COMPILE_NAME} {which}"
    must = COMPILE_MS if which == "maximum" else None
    return Row(name, "ms", compile_times(session)[name], must=must)


# The run.


def compile_ahead(found: Sequence[Problem]) -> None:
    """Compile the kernels of all problems at once, where one by one takes some 0.5 s each."""
    arch = arch_of(torch.cuda.current_device())

    def build(problem: Problem) -> None:
        specs = stand_ins(problem)
        kl.compile(descriptor_of(problem), archs=arch, specs=specs, workers=1, progress=False)

    products = [problem for problem in found if problem.mode != "softmax"]
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(build, products))


def cases(portable: bool) -> list[Case]:
    """Those measured with KERNLIB_PORTABLE=1, or all others."""
    found = [
        Case(p.name, partial(tidied, p, measure)) for p in problems() if p.is_portable == portable
    ]
    attentions = [
        Case(p.name, partial(tidied, p, attention.measure))
        for p in attention.problems()
        if p.is_compared or not portable
    ]
    if portable:
        return found + [case.portable() for case in attentions]
    found += [Case(p.name, partial(scaled.measure, p)) for p in scaled.problems()]
    found += attentions
    found += [Case(layout_name(*at[:3]), partial(measure_layout, *at)) for at in LAYOUTS]
    found.append(Case(HOT_NAME, hot_call))
    names = ("maximum", "median")
    return found + [Case(f"{COMPILE_NAME} {name}", partial(compile_row, name)) for name in names]


def tidied(problem, measured: Callable, session: Session) -> Row:
    row = measured(problem, session)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # operands in ever other sizes
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases and print their table. Returns the exit status."""
    listed = cases(current().portable)
    if torch.cuda.is_available():
        names = {case.name for case in harness.chosen(listed, harness.parse(argv, FAMILY).case)}
        compile_ahead([problem for problem in problems() if problem.name in names])
    return harness.main(FAMILY, listed, SOURCE, argv)
