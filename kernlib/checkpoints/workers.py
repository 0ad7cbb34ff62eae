"""Threads for work that overlaps with the computing thread's on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class Worker:
    """One thread, in a ``with`` block, whose work for a GPU goes to a stream of its own: on that of
    the caller, copies and kernels would wait for each other."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future:
        """Call ``function`` there, behind what the caller's stream has now. The result is whole
        when there is one; a tensor needs ``record_stream`` if another stream goes on with it."""
        before = torch.cuda.current_stream(self._stream.device).record_event()

        def call() -> Any:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                result = function(*args)
                self._stream.synchronize()
                return result

        return self._threads.submit(call)
