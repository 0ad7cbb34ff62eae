"""Calls as GPUs would make them, of meta tensors: nothing is loaded or launched, and the kernels
that would be are noted. A rehearsed call takes the same way as a real one, backward passes too, so
what :func:`kernlib.compile` and :func:`kernlib.prepare` list is what calls use.

Here are the rehearsals themselves, and what real calls tell the open blocks of
:func:`kernlib.recording`, which rehearse them for other GPUs. :mod:`kernlib.runtime.devices`
answers for the GPUs of a rehearsal and notes what would be loaded; the index of a meta tensor's
device is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch._C import _is_tracing
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered


class Rehearsal:
    """The GPUs of an arch, with each of ``counts`` multiprocessors, or one of them if a ``device``
    is given, and the kernels that calls would load there. A rehearsal that ``poses`` answers for
    real devices too, so that lowering a call of real tensors loads nothing."""

    def __init__(
        self, arch: str, device: int | None, counts: Sequence[int], poses: bool = False
    ) -> None:
        self.arch, self.device, self.counts, self.poses = arch, device, counts, poses
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
    """The rehearsal that answers for a device's index, None for a real device."""
    rehearsal = _current.get()
    return rehearsal if rehearsal is not None and (device < 0 or rehearsal.poses) else None


def like(t: torch.Tensor) -> torch.Tensor:
    """``torch.empty_like`` of a meta tensor, which itself would import a second of torch."""
    return t.new_empty_strided(t.shape, t.stride())


def on_gpu(device: torch.device) -> bool:
    """Whether kernels compute on a device: a GPU, or in a rehearsal one that stands for it."""
    return device.type == "cuda" or (device.type == "meta" and _current.get() is not None)


def is_traced() -> bool:
    """Whether calls are recorded to run later: by Dynamo, by a mode of the dispatcher, which sees
    no rehearsal, or by torch.jit.trace."""
    in_mode = is_in_torch_dispatch_mode() and _current.get() is None
    return is_dynamo_compiling() or in_mode or _is_tracing()


# Recordings.


class Recorder(Protocol):
    """An open block of :func:`kernlib.recording`, in any thread. It hears of kernels where they are
    loaded, and of calls where they get their plans. It began with empty plan caches, so a warm
    program passes these places again, and a hot forward pass need not ask for open blocks."""

    def note_kernel(self, spec: KernelSpec, arch: str) -> None:
        """A plan was made with a kernel, which is loaded on a GPU of this arch."""

    def note_call(self, call: Callable, arguments: tuple, device: int) -> None:
        """``call(*arguments)``, on tensors of a device, chooses its kernels. In a rehearsal it
        takes meta tensors in their place."""

    def note_lowering(self, lower: Callable[[], Lowered], device: int) -> None:
        """``lower()`` makes the kernels of a call that has no rehearsal. What it depends on of the
        device it asks :mod:`kernlib.runtime.devices`; it reads no data."""


recorders: list[Recorder] = []


def note_kernel(spec: KernelSpec, arch: str) -> None:
    """Tell all open blocks of a kernel."""
    for recorder in tuple(recorders):
        recorder.note_kernel(spec, arch)


def note_call(call: Callable, arguments: tuple, device: int) -> None:
    """Tell all open blocks of a call."""
    for recorder in tuple(recorders):
        recorder.note_call(call, arguments, device)


def note_lowering(lower: Callable[[], Lowered], device: int) -> None:
    """Tell all open blocks of a call that has no rehearsal."""
    for recorder in tuple(recorders):
        recorder.note_lowering(lower, device)
