"""Steps of an iteration as a CUDA graph, which the host launches with one call in the place of some
forty: below about 20,000 points a product takes less time than these do."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, ...]


def is_capturable(device: torch.device) -> bool:
    """Whether a graph can be captured there now."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return not torch.cuda.is_current_stream_capturing()


class Captured:
    """A step ``(*state) -> state`` on tensors that stay where they are.

    The step is captured, not run, when the graph is made: whatever it calls has run before, so that
    its kernels are loaded and libraries have their workspaces. It may not wait for the device.
    Raises CaptureError for a step that reads numbers in host memory, as the call would.
    """

    def __init__(self, step: Callable[..., Tensors], state: Tensors):
        self.state = tuple(t.clone() for t in state)
        self._graph, device = torch.cuda.CUDAGraph(), state[0].device
        current, apart = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        apart.wait_stream(current)
        # torch.cuda.graph also collects garbage and empties the allocator: 50 ms and more.
        with torch.cuda.stream(apart):
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for kept, made in zip(self.state, step(*self.state), strict=True):
                    kept.copy_(made)
            finally:
                self._graph.capture_end()
        current.wait_stream(apart)

    def run(self, state: Tensors, count: int) -> Tensors:
        """The state ``count`` steps behind the given one. It is overwritten by the next call."""
        for kept, given in zip(self.state, state, strict=True):
            if kept is not given:
                kept.copy_(given)
        for _ in range(count):
            self._graph.replay()
        return self.state
