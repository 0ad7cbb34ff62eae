"""What a test watches while it calls: waits for the device, its memory, launches; and captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from kernlib import events

Result = TypeVar("Result")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """What makes the host wait for the device meanwhile raises RuntimeError."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def capture() -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is called meanwhile, to be replayed behind it. A capture that fails leaves
    nothing: a graph that dies during the next capture takes torch's random numbers with it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            yield graph
    finally:
        del graph  # which the traceback of an error would keep


def peak(call: Callable[[], Result]) -> tuple[Result, int]:
    """What a call returns, and the most bytes that were allocated meanwhile beside those before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = call()
    return found, torch.cuda.max_memory_allocated() - before


@contextmanager
def heard() -> Iterator[list[events.Event]]:
    """The events meanwhile, such as a launch for each kernel."""
    found: list[events.Event] = []
    stop = events.subscribe(found.append)
    try:
        yield found
    finally:
        stop()


@contextmanager
def launches() -> Iterator[list[str]]:
    """The descriptions of the kernels that are launched meanwhile."""
    found: list[str] = []
    stop = events.subscribe(lambda e: e.name == "launch" and found.append(e.description))
    try:
        yield found
    finally:
        stop()
