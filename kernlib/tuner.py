"""Timing the kernels that could compute a call, and keeping the fastest.

A family takes part where its plans choose a kernel for a device: they ask
:func:`kernlib.runtime.tuned.choice`, which hands over what was kept, and hears of the candidates
while they are tried. A plan ignores a choice that it does not know.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from kernlib.ahead import build_all, candidates
from kernlib.debug import eager_only
from kernlib.descriptors.base import Descriptor
from kernlib.errors import CaptureError
from kernlib.jit import targets, tuning
from kernlib.jit.entry import Entry
from kernlib.progress import check as check_progress
from kernlib.progress import shown, wanted
from kernlib.runtime import devices
from kernlib.runtime.ahead import Candidate
from kernlib.runtime.plan import forget_plans

if TYPE_CHECKING:
    from kernlib.families.blocksparse.layout import Layout
    from kernlib.families.sparse.matrix import SparseMatrix

BATCH_MS = 2.0  # events resolve 0.5 us, and a launch takes 5 us of the host
LONGEST_BATCH = 2000  # launches
ROUNDS = 7
BUDGET_MS = 3000.0  # of all rounds; slower kernels get fewer, and one in any case


@dataclass(frozen=True)
class Timing:
    """One candidate: the milliseconds of a launch, the registers of a thread and the shared bytes
    of a block, and how many blocks a multiprocessor holds. The last three are None where NVRTC did
    not report them."""

    choice: dict[str, int]
    milliseconds: float
    registers: int | None
    shared_bytes: int | None
    blocks: int | None


@dataclass(frozen=True)
class Tuning:
    """What :func:`tune` found; printing it shows a table.

    ``winner`` is the choice of the fastest kernel, None for an output without elements. ``kept``
    says whether later calls use it: False when there was nothing to choose, or when the cache could
    not keep it.
    """

    description: str
    gpu: str
    timings: tuple[Timing, ...]
    winner: dict[str, int] | None
    kept: bool

    @property
    def conclusion(self) -> str:
        """The outcome in one sentence."""
        if not self.timings:
            return "The output has no elements, so nothing was timed and nothing kept."
        won = _words(self.winner)
        if len(self.timings) == 1:
            return f"There is one kernel for this call, {won}: nothing to choose, nothing kept."
        if not self.kept:
            return f"Fastest is {won}, but the cache cannot keep it: `kernlib doctor` says why."
        return f"Fastest is {won}: kept for this call on every {self.gpu}."

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=100, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich__(self):
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table()
        for heading in ("choice", "ms", "registers", "shared bytes", "blocks"):
            table.add_column(heading, justify="left" if heading == "choice" else "right")
        for timing in self.timings:
            table.add_row(*_row(timing), style="bold" if timing.choice == self.winner else "")
        title, conclusion = Text(f"{self.description} on {self.gpu}"), Text(self.conclusion)
        return Group(title, table, conclusion) if self.timings else Group(title, conclusion)


def _row(timing: Timing) -> tuple[str, ...]:
    numbers = (timing.registers, timing.shared_bytes, timing.blocks)
    texts = ("?" if number is None else str(number) for number in numbers)
    return (_words(timing.choice), f"{timing.milliseconds:.4f}", *texts)


def _words(choice: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in choice.items())


@eager_only
def tune(
    descriptor: Descriptor,
    *tensors: torch.Tensor | Layout | SparseMatrix,
    progress: bool | None = None,
    debug: bool = False,
    **arguments: Any,
) -> Tuning:
    """Time every kernel that could compute :func:`kernlib.run_kernel` of ``descriptor``,
    ``tensors`` and ``arguments``, and keep the fastest for all later calls with these sizes,
    layouts and dtypes on this model of GPU.

    The kernels run on the tensors' device and current stream, for some seconds at most unless one
    launch takes longer. They write into an output of their own, as large as the call's; ``out`` is
    not touched. ``progress`` shows a bar and the table on stderr: True always, False never, None if
    stderr is a terminal or a notebook's; elsewhere None writes a line every ten seconds.
    ``debug=True`` writes a line to stderr for each event.

    Raises what run_kernel raises, UnsupportedError for tensors that are on no GPU, and CaptureError
    while the stream captures a CUDA graph, since nothing runs then that could be timed.

    Example:
        >>> x = torch.randn(4096, 64)
        >>> result = kl.tune(kl.gaussian(), x.cuda(), x.cuda(), bandwidth=8.0)  # doctest: +SKIP
        >>> print(result.conclusion)  # doctest: +SKIP
        Fastest is ...: kept for this call on every ...
    """
    check_progress(progress)
    listed = candidates(descriptor, *tensors, **arguments)
    gpu = devices.model(listed.device)
    with torch.cuda.device(listed.device):
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "kernlib.tune times kernels, and while a CUDA graph is captured none of them runs: "
                "tune before the capture"
            )
        timings = _time_all(listed.device, listed.kernels, progress)
    fastest = min(timings, key=lambda timing: timing.milliseconds, default=None)
    winner = None if fastest is None else fastest.choice
    stored = len(timings) > 1 and tuning.keep(descriptor.family, gpu, listed.signature, winner)
    if stored:
        forget_plans()
    result = Tuning(descriptor.describe(), gpu.name, tuple(timings), winner, stored)
    if wanted(progress):
        _show(result)
    return result


def _show(result: Tuning) -> None:
    from rich.console import Console

    Console(file=sys.stderr).print(result)


def _time_all(device: int, kernels: list[Candidate], progress: bool | None) -> list[Timing]:
    arch = devices.arch_of(device)
    entries = build_all([(kernel.spec, arch) for kernel in kernels], None, progress)
    launches = [kernel.ready() for kernel in kernels]
    times = measure(launches, [kernel.spec.description for kernel in kernels], progress)
    return [
        _timing(kernel, milliseconds, built, arch)
        for kernel, milliseconds, built in zip(kernels, times, entries, strict=True)
    ]


def _timing(kernel: Candidate, milliseconds: float, built: Entry, arch: str) -> Timing:
    registers, shared = (_number(built.meta.get(name)) for name in ("registers", "shared_bytes"))
    blocks = None
    if registers and shared is not None:
        blocks = targets.resident_blocks(arch, kernel.spec.threads, registers, shared)
    return Timing(kernel.choice, milliseconds, registers, shared, blocks)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def measure(
    launches: list[Callable[[], None]], names: list[str], progress: bool | None
) -> list[float]:
    """Milliseconds of a launch of each: the median over batches that take turns, so that the clock,
    which falls as the GPU warms up, falls for all of them alike."""
    tasks = list(zip(launches, names, strict=True))
    with shown(progress, "warming up", len(tasks)) as bar:
        batches = [bar.count(name, partial(_fill, run)) for run, name in tasks]
    rounds = int(BUDGET_MS / max(sum(ms for _, ms in batches), BATCH_MS))
    rounds = max(1, min(ROUNDS, rounds))
    with shown(progress, "timing", rounds * len(tasks)) as bar:
        turns = [
            [
                bar.count(name, partial(_batch_ms, run, count)) / count
                for (run, name), (count, _) in zip(tasks, batches, strict=True)
            ]
            for _ in range(rounds)
        ]
    return [median(times) for times in zip(*turns, strict=True)]


def _fill(run: Callable[[], None]) -> tuple[int, float]:
    """The launches that fill a batch, and the milliseconds it takes."""
    count = 1
    while True:
        batch = _batch_ms(run, count)
        if batch >= BATCH_MS or count >= LONGEST_BATCH:
            return count, batch
        needed = math.ceil(1.2 * count * BATCH_MS / max(batch, 1e-3))
        count = min(max(needed, 2 * count), LONGEST_BATCH)


def _batch_ms(run: Callable[[], None], count: int) -> float:
    """Milliseconds of ``count`` launches one after another on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
