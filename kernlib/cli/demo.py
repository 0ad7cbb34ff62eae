"""``kernlib demo``: kernel matrices on this machine, with every step of the service shown."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from kernlib.cli import machine, places
from kernlib.cli.machine import ARCH_WITHOUT_GPU
from kernlib.cli.output import plain_errors, print_table

POINTS, OTHERS, FEATURES = 1000, 800, 64
ERROR_BOUND = 1e-5  # relative Frobenius norm against float64, for float32 inputs
GPU_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel of the demo and the numbers it is called with."""

    name: str
    descriptor: object
    arguments: dict[str, float]


@dataclass(frozen=True, slots=True)
class Result:
    """``origin`` says where the GPU kernel came from: compiled, or found in the cache."""

    name: str
    seconds: float
    error: float
    compiled: bool
    origin: str


@click.command()
def demo() -> None:
    """Compute five kernel matrices and compile or find their GPU kernels.

    With a CUDA GPU they run there and are compared with the CPU backend; without one they are
    computed on the CPU and compiled for sm_90a. The service's events go to stderr. Exits with 1 if
    a result is wrong or a kernel cannot be compiled.
    """
    with plain_errors():
        places.layers()  # what cannot be used is said once, before the work
        device = _gpu()
        if device is None:
            click.echo(
                f"No GPU to run on: computing on the CPU, compiling for {ARCH_WITHOUT_GPU}.\n"
            )
        else:
            click.echo(f"Running on {device[1]} ({device[2]}).\n")
        results = [_run(case, device) for case in _cases()]
        _report(results, device)
    wrong = [result.name for result in results if not result.error <= ERROR_BOUND]
    if wrong:
        raise click.ClickException(f"error above {ERROR_BOUND:g}: {', '.join(wrong)}")


def _cases() -> list[Case]:
    import kernlib as kl

    bump = kl.Custom("gain * exp(-((v / width) ** 2)) + 0.5", ("gain", "width"))
    return [
        Case("laplace_l1", kl.laplace_l1(), {"bandwidth": 50.0}),
        Case("gaussian", kl.gaussian(), {"bandwidth": 8.0}),
        Case("p_distance p=1.3", kl.p_distance(), {"p": 1.3}),
        Case("matern52", kl.matern52(), {"bandwidth": 8.0}),
        Case("custom bump of l2", kl.l2_distance(epilogue=bump), {"gain": 2.0, "width": 10.0}),
    ]


def _gpu() -> tuple | None:
    """Device, name and arch of the first GPU if kernels run on it; stderr says why not."""
    import torch

    for gpu in machine.gpus()[:1]:
        if gpu.arch is not None:
            return torch.device("cuda", gpu.index), gpu.name, gpu.arch
        click.echo(gpu.problem, err=True)
    return None


def _run(case: Case, device: tuple | None) -> Result:
    import torch

    import kernlib as kl

    generator = torch.Generator("cpu").manual_seed(0)
    sizes = (POINTS, FEATURES), (OTHERS, FEATURES)
    x, y = (
        torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes
    )
    with _watched() as seen:
        if device is None:
            kl.compile(case.descriptor, archs=(ARCH_WITHOUT_GPU,), specs=(x, y), **case.arguments)
            result, seconds = _timed_on_cpu(case, x, y)
        else:
            first = kl.run_kernel(
                case.descriptor, x.to(device[0]), y.to(device[0]), **case.arguments
            )
    if device is not None:
        result, seconds = first.cpu(), _time_on_gpu(case, x.to(device[0]), y.to(device[0]))
    exact = kl.run_kernel(case.descriptor, x.double(), y.double(), **case.arguments)
    error = ((result.double() - exact).norm() / exact.norm()).item()
    return Result(case.name, seconds, error, *_origin(seen))


@contextmanager
def _watched() -> Iterator[list]:
    """Write the block's events to stderr and collect them."""
    from kernlib import events

    seen: list = []
    unsubscribe = events.subscribe(seen.append)
    try:
        with events.on_stderr():
            yield seen
    finally:
        unsubscribe()


def _timed_on_cpu(case: Case, x, y) -> tuple:
    import kernlib as kl

    start = time.perf_counter()
    result = kl.run_kernel(case.descriptor, x, y, **case.arguments)
    return result, time.perf_counter() - start


def _time_on_gpu(case: Case, x, y) -> float:
    """Seconds of one call, over several after the first."""
    import torch

    import kernlib as kl

    out = kl.run_kernel(case.descriptor, x, y, **case.arguments)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(GPU_REPEATS):
        kl.run_kernel(case.descriptor, x, y, out=out, **case.arguments)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / GPU_REPEATS


def _origin(seen: list) -> tuple[bool, str]:
    for event in seen:
        if event.name == "compile":
            registers = event.fields["registers"]
            return True, f"compiled in {event.fields['ms']} ms, {registers} registers"
    return False, "hit"


def _report(results: list[Result], device: tuple | None) -> None:
    arch = ARCH_WITHOUT_GPU if device is None else device[2]
    columns = {
        "kernel": "left",
        "CPU ms" if device is None else "GPU ms": "right",
        "error against float64": "right",
        f"kernel for {arch}": "left",
    }
    rows = [(r.name, f"{r.seconds * 1e3:.3f}", f"{r.error:.1e}", r.origin) for r in results]
    click.echo("", err=True)
    print_table(columns, rows, title=f"{POINTS} x {OTHERS} points, {FEATURES} features, float32")
    click.echo(_conclusion(results))


def _conclusion(results: list[Result]) -> str:
    from kernlib.jit import service

    path = service.layers().store.info()["path"]
    compiled = sum(result.compiled for result in results)
    if not compiled:
        return f"Nothing was compiled: all {len(results)} kernels were found in the cache, {path}."
    made = f"{compiled} of {len(results)} kernels were compiled"
    if path is None:
        return f"{made} and are lost with this process; `kernlib doctor` says why."
    return f"{made} and kept in {path}; a second run will find them there."
