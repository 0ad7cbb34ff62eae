"""Times on the GPU, the floors beside them, and errors against float64."""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

REPLAY_BELOW_MS = 1.0  # below it a launch gap of some microseconds would show
SLOW_START_MS = 20.0  # below it a call may have waited for the host, as autograd's first one does
LONG_MS, VERY_LONG_MS = 300.0, 1000.0
SWEEP_BYTES = 256 << 20  # five times the largest L2 of a supported GPU
ROTATED_BYTES = 400 << 20
MAX_SETS = 2048  # calls in one graph, for problems of a few KB
SAMPLE_ROWS = 64
LANES, SPECIAL_LANES = 128, 16  # issue slots and special-function operations of an SM and clock


class Memory(NamedTuple):
    """Bytes/s of device memory that is only read, only written, and copied within the device."""

    read: float
    written: float
    copied: float


# As measured with 4 GB and more: a sum, a fill, a copy.
MEMORY = {
    "NVIDIA H200": Memory(4.3e12, 3.37e12, 4.3e12),
    "NVIDIA H100 80GB HBM3": Memory(3.02e12, 3.26e12, 3.0e12),
}


@cache
def memory() -> Memory:
    """That of the GPU that measures; the H200's where there is none, or one that is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return MEMORY.get(name, MEMORY["NVIDIA H200"])


def query_gpu(what: str) -> str:
    """One value from nvidia-smi for the first GPU, "" without it."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if lines else ""


# Floors.


@dataclass(frozen=True)
class Device:
    """What floors are computed from."""

    multiprocessors: int
    clock_hz: float

    @classmethod
    def current(cls) -> Device:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        khz = getattr(properties, "clock_rate", 0)
        clock = khz * 1e3 if khz else float(query_gpu("clocks.max.sm")) * 1e6
        return cls(properties.multi_processor_count, clock)

    def floors_ms(self, slots: float, special: float, written: float) -> dict[str, float]:
        """Milliseconds that issue slots, special-function operations and bytes take at least."""
        clocks = self.multiprocessors * self.clock_hz
        return {
            "issue slots": slots / (clocks * LANES) * 1e3,
            "special functions": special / (clocks * SPECIAL_LANES) * 1e3,
            "bytes": written / memory().copied * 1e3,
        }

    def floor_ms(self, slots: float, special: float, written: float) -> tuple[float, str]:
        """The largest of the floors, and its name."""
        floors = self.floors_ms(slots, special, written)
        bound = max(floors, key=floors.__getitem__)
        return floors[bound], bound


# Timing.


class CudaTimer:
    """The two ways to time work on the GPU, in milliseconds of one call."""

    def __init__(self) -> None:
        self._sweep = torch.empty(SWEEP_BYTES, dtype=torch.uint8, device="cuda")

    def swept(self, call: Callable, buffers: tuple) -> float:
        """One call between two events, with nothing of its data left in L2."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        self._sweep.fill_(1)
        begin.record()
        call(*buffers)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def replayed(self, call: Callable, buffers: tuple, repetitions: int) -> float:
        """One call of a graph of many, each on buffers of its own."""
        sets = rotated(buffers)
        graph, results = torch.cuda.CUDAGraph(), []
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for one in sets:
                results.append(call(*one))  # kept, so that no two calls share an output
        graph.replay()
        times = [self.swept(graph.replay, ()) for _ in range(repetitions)]
        return statistics.median(times) / len(sets)


def rotated(buffers: tuple) -> list[tuple]:
    """Copies of the buffers, ROTATED_BYTES in all."""
    one = sum(t.numel() * t.element_size() for t in buffers)
    count = min(MAX_SETS, max(2, math.ceil(ROTATED_BYTES / max(one, 1))))
    return [buffers, *(tuple(t.clone() for t in buffers) for _ in range(count - 1))]


def time_call(
    timer,
    call: Callable,
    buffers: tuple,
    quick: bool = False,
    in_graph: bool = False,
    captured: bool = True,
) -> float:
    """Milliseconds of ``call(*buffers)``, which has run once already: the median of several. Of a
    graph where it is short or ``in_graph``, unless none can hold it (``captured``)."""
    times = [timer.swept(call, buffers)]
    if not quick and REPLAY_BELOW_MS <= times[0] < SLOW_START_MS:
        times.append(timer.swept(call, buffers))
    count = repetitions(times[0], quick)
    if captured and (in_graph or min(times) < REPLAY_BELOW_MS):
        return timer.replayed(call, buffers, count)
    times += [timer.swept(call, buffers) for _ in range(count - len(times))]
    return statistics.median(times)


def repetitions(milliseconds: float, quick: bool = False) -> int:
    """How often to time a call: less often where one repetition takes long."""
    if quick:
        return 1
    if milliseconds > VERY_LONG_MS:
        return 2
    return 3 if milliseconds > LONG_MS else 7


# Errors.


def sample_rows(count: int, device: str = "cuda") -> torch.Tensor:
    """Indices of SAMPLE_ROWS rows, or of all, spread evenly over ``count``."""
    wanted = min(count, SAMPLE_ROWS)
    return torch.arange(wanted, device=device) * (count - 1) // max(wanted - 1, 1)


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative Frobenius norm of the difference. Raises ValueError when it is not a number."""
    error = ((result.double() - exact).norm() / exact.norm()).item()
    if not math.isfinite(error):
        raise ValueError(f"the error against float64 is {error}")
    return error
