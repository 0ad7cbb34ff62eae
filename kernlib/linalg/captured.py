"""Steps of an iteration as a CUDA graph, which the host launches with one call in place of some
forty. Below about 20,000 points a product takes less time than forty launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Tensors = tuple[torch.Tensor, ...]

# Streams of each device on which nothing is captured now. A new one for each capture would leave
# cuBLAS's workspace behind, which it keeps for a thread and stream: 32 MiB on an H100, and torch
# has 32 streams. As many are made as threads capture at a time.
idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def is_capturable(device: torch.device) -> bool:
    """Whether a graph can be captured there now."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


def is_busy(device: torch.device) -> bool:
    """Whether the device has not done yet what its current stream was given."""
    return device.type == "cuda" and not torch.cuda.current_stream(device).query()


@contextmanager
def stream_apart(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """A stream that no other capture of kernlib uses meanwhile."""
    idle = idle_streams.setdefault(device, [])
    try:
        stream = idle.pop()  # in one step, as threads may ask at a time
    except IndexError:
        stream = torch.cuda.Stream(device)
    try:
        yield stream
    finally:
        idle.append(stream)


class Captured:
    """A step ``(*state) -> state`` on tensors that stay where they are.

    The step is captured, not run, when the graph is made: whatever it calls has run before, so that
    its kernels and libraries are loaded. It may not wait for the device.
    Raises CaptureError for a step that reads numbers in host memory, as the call would.
    """

    def __init__(self, step: Callable[..., Tensors], state: Tensors):
        self.state = tuple(t.clone() for t in state)
        self._graph, device = torch.cuda.CUDAGraph(), state[0].device
        with stream_apart(device) as apart:
            self._capture(step, torch.cuda.current_stream(device), apart)

    def _capture(
        self, step: Callable[..., Tensors], current: torch.cuda.Stream, apart: torch.cuda.Stream
    ) -> None:
        apart.wait_stream(current)
        # torch.cuda.graph also collects garbage and empties the allocator: 50 ms and more.
        with torch.cuda.stream(apart):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for target, value in zip(self.state, step(*self.state), strict=True):
                    target.copy_(value)
            finally:
                self._graph.capture_end()
        current.wait_stream(apart)

    def run(self, state: Tensors, count: int) -> Tensors:
        """The state ``count`` steps behind the given one. It is overwritten by the next call."""
        for target, value in zip(self.state, state, strict=True):
            if target is not value:
                target.copy_(value)
        for _ in range(count):
            self._graph.replay()
        return self.state
