"""The blocks of :func:`kernlib.recording` that are open, in any thread.

They hear of kernels where these are loaded, and of calls where these get their plans. A block
begins with empty plan caches, so a warm program passes these places again, and a hot call asks
nobody whether a block is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered


class Recorder(Protocol):
    """What an open block is told."""

    def note_kernel(self, spec: KernelSpec, arch: str) -> None:
        """A kernel was loaded on a GPU of an arch, or was already when a plan asked for it."""

    def note_call(self, call: Callable, arguments: tuple, device: int) -> None:
        """``call(*arguments)``, on tensors of a device, chooses its kernels. In a rehearsal the
        call takes meta tensors in their place."""

    def note_lowering(self, lower: Callable[[], Lowered], device: int) -> None:
        """``lower()`` makes the kernels of a call that has no rehearsal: it asks
        :mod:`kernlib.runtime.devices` for what it depends on of the device, and reads no data."""


active: list[Recorder] = []


def note_kernel(spec: KernelSpec, arch: str) -> None:
    """Tell all open blocks of a kernel."""
    for recorder in tuple(active):
        recorder.note_kernel(spec, arch)


def note_call(call: Callable, arguments: tuple, device: int) -> None:
    """Tell all open blocks of a call."""
    for recorder in tuple(active):
        recorder.note_call(call, arguments, device)


def note_lowering(lower: Callable[[], Lowered], device: int) -> None:
    """Tell all open blocks of a call that has no rehearsal."""
    for recorder in tuple(active):
        recorder.note_lowering(lower, device)
