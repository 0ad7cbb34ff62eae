"""``kernlib bench``: a quick table of this machine's GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import click

from kernlib import progress
from kernlib.cli import machine, places, workloads
from kernlib.cli.machine import GpuClock, milliseconds
from kernlib.cli.options import json_option
from kernlib.cli.output import plain_errors, print_json, print_table, say

COLUMNS = {
    "family": "left",
    "kernlib": "right",
    "torch": "right",
    "faster": "right",
    "error": "right",
    "call": "left",
}
SPARE = ("error", "torch", "faster")  # columns that a narrow terminal drops
# What makes each call: some hundred megabytes at most, so that small GPUs have room.
CASES: tuple[Callable[[workloads.Maker], workloads.Call], ...] = (
    lambda make: make.pairwise("gaussian", 8192, 8192, 64, 8.0),
    lambda make: make.pairwise("laplace_l1", 8192, 8192, 64, 50.0),
    lambda make: make.kronecker_sparse((6, 64, 64, 1), 25088, "fp16"),
    lambda make: make.kronecker_sparse((1, 768, 192, 2), 25088, "fp16"),
    lambda make: make.kronecker_sparse((1, 768, 192, 2), 25088, "fp32"),
    lambda make: make.kronecker_product((16, 16, 16), 1024, "fp16"),
    lambda make: make.kronecker_product((16, 16, 16), 1024, "fp32"),
    lambda make: make.sparse(4096, 4096, "fp16"),
    lambda make: make.sparse(4096, 11008, "fp16"),
    lambda make: make.block_sparse(4096, 4096, "fp16"),
    lambda make: make.block_sparse(4096, 4096, "fp32"),
)


class Row(NamedTuple):
    """One call: milliseconds by kernlib and by torch, and the error, all of one precision."""

    family: str
    call: str
    precision: str
    kernlib: float
    torch: float
    error: float
    bound: float

    @property
    def faster(self) -> float:
        return self.torch / self.kernlib


@click.command()
@json_option
def bench(as_json: bool) -> None:
    """Time calls of every family on this machine's GPU.

    Each is timed beside what one would write in torch, with nothing of its data in the GPU's cache,
    and its error is that against float64. Kernels that the cache lacks are compiled first. Exits
    with 1 without a GPU that kernels run on, or if a result is wrong. The benchmarks of README are
    those of `python -m benchmarks.<family>` in a checkout.
    """
    with plain_errors():
        places.layers()
        with progress.busy("loading torch"):
            gpu = _gpu()
        rows = _rows(gpu)
    if as_json:
        facts = [{**row._asdict(), "faster": row.faster} for row in rows]
        print_json({"gpu": gpu.name, "arch": gpu.arch, "unit": "ms", "calls": facts})
    else:
        _print(rows, gpu)
    wrong = [f"{row.precision} {row.call}" for row in rows if not row.error <= row.bound]
    if wrong:
        raise click.ClickException(f"the error is too large: {'; '.join(wrong)}")


def _gpu() -> machine.Gpu:
    """The first GPU that kernels run on. Raises ClickException, which says what to do."""
    gpus = machine.gpus()
    usable = [gpu for gpu in gpus if gpu.arch is not None]
    if usable:
        return usable[0]
    why = gpus[0].problem if gpus else "torch sees none here"
    raise click.ClickException(
        f"bench needs an NVIDIA GPU that kernels run on: {why.rstrip('.')}. `kernlib doctor` says "
        "what is missing, and `kernlib demo` runs on the CPU."
    )


def ready(gpu: machine.Gpu) -> tuple:
    """The device, which becomes torch's current one, and a clock of it."""
    import torch

    torch.cuda.set_device(gpu.index)
    device = torch.device("cuda", gpu.index)
    return device, GpuClock(device)


def _rows(gpu: machine.Gpu) -> list[Row]:
    device, clock = ready(gpu)
    place, make = workloads.Place(gpu.index, gpu.name, gpu.arch), workloads.Maker(device)
    rows = []
    with progress.shown(None, "measuring", len(CASES)) as bar:
        for number, case in enumerate(CASES, 1):  # made one at a time, for room

            def row(case=case) -> Row:
                return _row(case(make), place, clock)

            rows.append(bar.count(f"call {number}", row))
    return rows


def _row(call: workloads.Call, place: workloads.Place, clock) -> Row:
    workloads.compiled([call], place, show=False)
    times = clock(call.run), clock(call.by_torch)
    return Row(call.family, call.name, call.precision, *times, call.error(), call.bound)


def _print(rows: list[Row], gpu: machine.Gpu) -> None:
    cells = [
        (
            row.family,
            milliseconds(row.kernlib),
            milliseconds(row.torch),
            f"{row.faster:.2f}×",
            f"{row.error:.0e}",
            f"{row.precision} {row.call}",
        )
        for row in rows
    ]
    print_table(COLUMNS, cells, f"Milliseconds on {gpu.name} ({gpu.arch})", SPARE)
    click.echo()
    say(
        "Torch's are of what one would write at first. `kernlib.tune` may find a faster kernel for "
        "a call of your own."
    )
