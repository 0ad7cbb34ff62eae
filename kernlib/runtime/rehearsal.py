"""Calls as GPUs would make them, of meta tensors: nothing is loaded or launched, and the kernels
that would be are noted. A rehearsed call takes the same way as a real one, backward passes too, so
what :func:`kernlib.compile` and :func:`kernlib.prepare` list is what calls use.

Here are the rehearsals themselves. :mod:`kernlib.runtime.devices` answers for their GPUs and notes
what would be loaded; the index of a meta tensor's device is -1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch._C import _is_tracing
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.jit.spec import KernelSpec


class Rehearsal:
    """The GPUs of an arch, with each of ``counts`` multiprocessors, or one of them if a ``device``
    is given, and the kernels that calls would load there."""

    def __init__(self, arch: str, device: int | None, counts: Iterable[int]):
        self.arch, self.device, self.counts = arch, device, counts
        self._noted: dict[KernelSpec, None] = {}

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels, each once, in the order in which calls would load them."""
        return list(self._noted)

    def note(self, specs: Iterable[KernelSpec]) -> None:
        self._noted.update(dict.fromkeys(specs))


_current: ContextVar[Rehearsal | None] = ContextVar("kernlib_rehearsal", default=None)


@contextmanager
def entered(rehearsal: Rehearsal) -> Iterator[Rehearsal]:
    """Calls of meta tensors in this block, in this thread, are rehearsed."""
    token = _current.set(rehearsal)
    try:
        yield rehearsal
    finally:
        _current.reset(token)


def current() -> Rehearsal | None:
    """The rehearsal of this thread, if there is one."""
    return _current.get()


def of(device: int) -> Rehearsal | None:
    """The rehearsal that a device's index is of, None for a real device."""
    return _current.get() if device < 0 else None


def like(t: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like`` of a meta tensor, which itself would import a second of torch."""
    return t.new_empty_strided(t.shape, t.stride())


def on_gpu(device: torch.device) -> bool:
    """Whether kernels compute on a device: a GPU, or in a rehearsal one that stands for it."""
    return device.type == "cuda" or (device.type == "meta" and _current.get() is not None)


def is_traced() -> bool:
    """Whether somebody records calls and runs them later: Dynamo, a mode of the dispatcher, which
    sees no rehearsal, or torch.jit.trace."""
    in_mode = is_in_torch_dispatch_mode() and _current.get() is None
    return is_dynamo_compiling() or in_mode or _is_tracing()
