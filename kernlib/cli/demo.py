"""``kernlib demo``: a call of every family on this machine, beside torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import click

from kernlib import progress
from kernlib.cli import machine, places, workloads
from kernlib.cli.machine import ARCH_WITHOUT_GPU, CpuClock, GpuClock, milliseconds
from kernlib.cli.options import json_option
from kernlib.cli.output import counted, plain_errors, print_json, print_table, say

COLUMNS = {
    "family": "left",
    "kernlib": "right",
    "torch": "right",
    "error": "right",
    "kernels": "left",
    "call": "left",
}
SPARE = ("kernels", "torch")  # columns that a narrow terminal drops
CASES: tuple[Callable[[workloads.Maker], workloads.Call], ...] = (
    lambda make: make.pairwise("gaussian", 1000, 800, 64, 8.0),
    lambda make: make.pairwise("laplace_l1", 1000, 800, 64, 50.0),
    lambda make: make.kronecker_sparse((6, 64, 64, 1), 1024, "fp32"),
    lambda make: make.kronecker_product((16, 16, 16), 256, "fp32"),
    lambda make: make.sparse(512, 512, "fp32", "macko"),
    lambda make: make.block_sparse(1024, 256, "fp32"),
)


class Result(NamedTuple):
    """A call with its times in milliseconds; ``kernels`` holds the keys of those that it needs, and
    is None where nothing compiles."""

    call: workloads.Call
    kernlib: float
    torch: float
    error: float
    kernels: frozenset[str] | None


@click.command()
@click.option("--events", is_flag=True, help="Write what the cache does to stderr, a line each.")
@json_option
def demo(events: bool, as_json: bool) -> None:
    """Run a call of every family here, beside torch.

    With a CUDA GPU the calls run there. Without one they are computed on the CPU, and their kernels
    are compiled for sm_90a if a compiler is installed. Errors are those of float32 against float64.
    Exits with 1 if a result is wrong or a kernel cannot be compiled that has a GPU to run on.
    """
    with plain_errors():
        places.layers()  # what cannot be used is said once, before the work
        with progress.busy("loading torch"):
            place = _place()
        with _watched(events) as seen:
            with progress.busy("making matrices"):
                calls = _calls(place)
            kernels, lack = _kernels(calls, place)
            if not as_json:
                _say_where(place, lack)
            results = _results(calls, kernels, place)
        compiled = {event.key for event in seen if event.name == "compile"}
        if as_json:
            print_json(_facts(results, place, compiled, lack))
        else:
            _report(results, place, compiled)
    wrong = [result.call.name for result in results if not result.error <= result.call.bound]
    if wrong:
        raise click.ClickException(f"the error is too large: {'; '.join(wrong)}")


def _place() -> workloads.Place:
    """The first GPU if kernels run on it; stderr says why not."""
    for gpu in machine.gpus()[:1]:
        if gpu.arch is not None:
            return workloads.Place(gpu.index, gpu.name, gpu.arch)
        click.echo(gpu.problem, err=True)
    return workloads.Place(None, "CPU", ARCH_WITHOUT_GPU)


def _say_where(place: workloads.Place, lack: str) -> None:
    if place.index is not None:
        say(f"Running on {place.name}, for which kernels are compiled as {place.arch}.")
        return
    text = "No GPU to run on: kernlib computes on the CPU, by way of torch. "
    say(text + (lack or f"The kernels are compiled for {place.arch} and do not run."))


def _calls(place: workloads.Place) -> list[workloads.Call]:
    import torch

    device = torch.device("cpu" if place.index is None else f"cuda:{place.index}")
    make = workloads.Maker(device)
    return [case(make) for case in CASES]


@contextmanager
def _watched(on_stderr: bool) -> Iterator[list]:
    """Collect the block's events, and write them to stderr if that is wanted."""
    from kernlib import events

    seen: list = []
    unsubscribe = events.subscribe(seen.append)
    try:
        with events.on_stderr() if on_stderr else nullcontext():
            yield seen
    finally:
        unsubscribe()


def _kernels(calls: list, place: workloads.Place) -> tuple[list[frozenset[str] | None], str]:
    """The keys of each call's kernels, and "". Where no compiler is installed and no GPU would run
    them, None for each, and what is missing. Raises what kernlib.compile raises."""
    from kernlib.errors import INSTALL, UnsupportedError
    from kernlib.jit import toolchain

    try:
        return list(workloads.compiled(calls, place)), ""
    except UnsupportedError as error:
        if place.index is not None:
            raise
        absent = toolchain.absent()
        why = f". Missing: {absent}. To install: {INSTALL}" if absent else f": {error}"
        return [None] * len(calls), f"The kernels were not compiled{why}"


def _results(calls: list, kernels: list, place: workloads.Place) -> list[Result]:
    with progress.shown(None, "computing", len(calls)) as bar:
        clock = CpuClock() if place.index is None else GpuClock(calls[0].dense[0].device)
        return [
            bar.count(call.name, lambda call=call, needs=needs: _result(call, needs, clock))
            for call, needs in zip(calls, kernels, strict=True)
        ]


def _result(call: workloads.Call, kernels: frozenset[str] | None, clock) -> Result:
    return Result(call, clock(call.run), clock(call.by_torch), call.error(), kernels)


def _facts(results: list[Result], place: workloads.Place, compiled: set[str], lack: str) -> dict:
    """All that is printed, with the keys that ``kernlib bench --json`` has too."""
    calls = [
        {
            "family": result.call.family,
            "call": result.call.name,
            "precision": result.call.precision,
            "kernlib": result.kernlib,
            "torch": result.torch,
            "error": result.error,
            "bound": result.call.bound,
            "kernels": None if result.kernels is None else sorted(result.kernels),
        }
        for result in results
    ]
    where = {"gpu": None if place.index is None else place.name, "arch": place.arch, "unit": "ms"}
    compilation = {"path": _store(), "compiled": sorted(compiled), "not_compiled": lack or None}
    return {**where, **compilation, "calls": calls}


def _report(results: list[Result], place: workloads.Place, compiled: set[str]) -> None:
    rows = [
        (
            result.call.family,
            milliseconds(result.kernlib),
            milliseconds(result.torch),
            f"{result.error:.0e}",
            _origin(result.kernels, compiled),
            result.call.name,
        )
        for result in results
    ]
    click.echo()
    print_table(COLUMNS, rows, f"Milliseconds on the {_short(place)}, float32", SPARE)
    click.echo()
    say(_legend(place))
    if all(result.kernels is not None for result in results):
        say(_conclusion(results, compiled))
    say(_next(place))


def _short(place: workloads.Place) -> str:
    return "CPU" if place.index is None else "GPU"


def _origin(kernels: frozenset[str] | None, compiled: set[str]) -> str:
    if kernels is None:
        return "not compiled"
    new = len(kernels & compiled)
    if not new:
        return f"{len(kernels)} found"
    return f"{new} compiled" if new == len(kernels) else f"{new} of {len(kernels)} new"


def _legend(place: workloads.Place) -> str:
    text = "torch: the same by plain torch. error: kernlib's, relative to float64."
    if place.index is None:
        text += " On a CPU both are computed by torch: these times say nothing of the kernels."
    return text


def _store() -> str | None:
    """Where kernels are kept; None for a cache that is lost with this process."""
    from kernlib.jit import service

    return service.layers().store.info()["path"]


def _conclusion(results: list[Result], compiled: set[str]) -> str:
    path = _store()
    needed = frozenset().union(*(result.kernels for result in results))
    if not compiled:
        return f"Nothing was compiled: all {len(needed)} kernels were found in the cache, {path}."
    outcome = f"{len(compiled)} of {counted(len(needed | compiled), 'kernel')} were compiled"
    if path is None:
        return f"{outcome} and are lost with this process; `kernlib doctor` says why."
    return f"{outcome} and kept in {path}; a second run will find them there."


def _next(place: workloads.Place) -> str:
    if place.index is None:
        return (
            "Next: README's first example, the code in docs/ and `python examples/quickstart.py` "
            "run on CPU tensors too."
        )
    return "Next: `kernlib bench` measures larger calls, and the examples are in examples/."
