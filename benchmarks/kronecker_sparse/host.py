"""What a Kronecker-sparse call costs besides the GPU: time of the host, and of NVRTC."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

import kernlib as kl
from benchmarks.common.harness import Case, Row, Session, attempt
from benchmarks.common.timing import relative_error
from benchmarks.kronecker_sparse.problems import (
    KINDS,
    PATTERNS,
    Problem,
    exact,
    problems,
    stand_ins,
    tensors,
    text_of,
)
from benchmarks.kronecker_sparse.rivals import blocks, einsum, matrix
from benchmarks.service.run import CPU_ARCH, host_us
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec

FEW = 64  # rows
# Pattern, rows and the microseconds asked: one launch, and two, of more rows and d > 1, where the
# weight is packed first.
HOT_CALLS = (
    ((6, 64, 64, 1), FEW, 12.0),
    ((1, 768, 192, 2), FEW, 15.0),
    ((1, 768, 192, 2), 4 * FEW, 15.0),  # packs its weight first
)
COMPILE_MUST_MS = 500.0
COMPILE_PREFIX = "kronecker_sparse compile"


def hot_name(pattern: tuple, batch: int) -> str:
    rows = "" if batch == FEW else f"of {batch} rows "
    return f"kronecker_sparse hot call {rows}{text_of(pattern)} fp16"


SECONDS = {  # by estimate
    **{hot_name(pattern, batch): 2.0 for pattern, batch, _ in HOT_CALLS},
    f"{COMPILE_PREFIX} maximum": 15.0,
    f"{COMPILE_PREFIX} median": 0.0,
}


# The hot call.


def hot_call(
    pattern: tuple, batch: int, must: float, session: Session, device: str = "cuda"
) -> Row:
    """Host time of a call that records no gradient, of few rows, batch first."""
    problem = Problem("host", pattern, False, "fp16", batch)
    x, weight, _ = tensors(problem, device)
    descriptor, run_kernel = problem.descriptor, kl.run_kernel
    stored, dense, multiply = blocks(weight), matrix(weight), einsum(problem)

    def timed(call) -> float:
        return host_us(call, torch.cuda.synchronize, session.quick)

    with torch.no_grad():
        wanted = exact(problem, x, weight, torch.arange(batch, device=device))
        error = relative_error(run_kernel(descriptor, x, weight), wanted)
        us = timed(lambda: run_kernel(descriptor, x, weight))
        row = Row(hot_name(pattern, batch), "us", us, error=error, must=must)
        calls = {"einsum": lambda: multiply(x, stored), "dense": lambda: F.linear(x, dense)}
        for name, call in calls.items():
            found = attempt(name, row.case, lambda call=call: timed(call))
            if found is not None:
                row.rivals[name] = found
    return row


# Compile times.


def kernels(arch: str) -> list[KernelSpec]:
    """Every kernel of the section ``patterns``, once."""
    from kernlib import ahead

    found = [
        spec
        for problem in problems("patterns", PATTERNS, tuple(KINDS))
        for spec in ahead.specs(problem.descriptor, arch, stand_ins(problem), {})
    ]
    return list({spec.canonical(): spec for spec in found}.values())


def compile_times(session: Session) -> dict[str, float]:
    """Maximum and median of NVRTC's milliseconds, one kernel after the other, once a session."""
    maximum, median = f"{COMPILE_PREFIX} maximum", f"{COMPILE_PREFIX} median"
    if maximum not in session.ours:
        cuda = torch.cuda.is_available()
        arch = targets.arch_of(torch.cuda.get_device_capability()) if cuda else CPU_ARCH
        found = kernels(arch)
        milliseconds(found[0], arch)  # loads NVRTC
        times = [milliseconds(spec, arch) for spec in found]
        session.ours |= {maximum: max(times), median: statistics.median(times)}
    return session.ours


def milliseconds(spec: KernelSpec, arch: str) -> float:
    from kernlib.jit.compiler import compile_spec

    start = time.perf_counter()
    compile_spec(spec, arch)
    return (time.perf_counter() - start) * 1e3


def compile_row(which: str, session: Session) -> Row:
    name = f"{COMPILE_PREFIX} {which}"
    must = COMPILE_MUST_MS if which == "maximum" and torch.cuda.is_available() else None
    return Row(name, "ms", compile_times(session)[name], must=must)


def cases() -> list[Case]:
    return [
        *[
            Case(hot_name(*call[:2]), lambda session, call=call: hot_call(*call, session))
            for call in HOT_CALLS
        ],
        *[
            Case(
                f"{COMPILE_PREFIX} {which}",
                lambda session, which=which: compile_row(which, session),
            )
            for which in ("maximum", "median")
        ],
    ]
