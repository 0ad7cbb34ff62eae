"""The GPUs of this machine, as far as kernels are concerned, and how long calls take here: on a GPU
by its own events, on the CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kernlib.records import NamedTuple

ARCH_WITHOUT_GPU = "sm_90a"
SWEEP_BYTES = 256 << 20  # more than any supported GPU's L2 holds
GPU_REPEATS, CPU_REPEATS = 20, 3
LONG_MS = 250.0


class Gpu(NamedTuple):
    """A GPU that torch can use. Without ``arch`` kernels do not run there, and ``problem`` says
    why."""

    index: int
    name: str
    arch: str | None
    problem: str = ""


def gpus() -> list[Gpu]:
    """All that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> Gpu:
    import torch

    from kernlib.errors import UnsupportedError
    from kernlib.runtime.devices import arch_of

    name = torch.cuda.get_device_name(index)
    try:
        return Gpu(index, name, arch_of(index))
    except UnsupportedError as error:
        return Gpu(index, name, None, str(error))


def archs() -> list[str]:
    """The targets of this machine's GPUs, each once."""
    return list(dict.fromkeys(gpu.arch for gpu in gpus() if gpu.arch is not None))


class GpuClock:
    """Milliseconds of one call, the median of several, with nothing of its data left in L2."""

    def __init__(self, device):
        import torch

        self._sweep = torch.empty(SWEEP_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        import torch

        call()
        pairs = [_events() for _ in range(GPU_REPEATS)]
        for begin, end in pairs:
            self._sweep.fill_(1)  # meanwhile the host has queued the call
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def _events() -> tuple:
    import torch

    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class CpuClock:
    """Milliseconds of one call, the least of several: others may be at work here. One that takes
    long is not repeated."""

    def __call__(self, call: Callable[[], object]) -> float:
        times = [self._once(call)]
        while len(times) <= CPU_REPEATS and sum(times) < LONG_MS:
            times.append(self._once(call))
        return min(times)

    def _once(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)


def milliseconds(amount: float) -> str:
    """Three digits: ``130``, ``12.3``, ``0.0123``."""
    if amount >= 100:
        return f"{amount:.0f}"
    return f"{amount:.3g}" if amount >= 0.001 else f"{amount:.4f}"
