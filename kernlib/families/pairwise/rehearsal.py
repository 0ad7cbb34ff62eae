"""Calls as GPUs would make them, of meta tensors: nothing is loaded or launched, and the kernels
are noted that would be. A rehearsed call takes the very way of a real one, backward passes too, so
that what is listed ahead of calls (:mod:`kernlib.families.pairwise.ahead`) is what they use.

Here is what plans ask of GPUs and of :mod:`kernlib.runtime`, for whose tensors nothing changes. The
index of a meta tensor's device is -1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered
from kernlib.runtime import devices, sequence
from kernlib.runtime.devices import Model
from kernlib.runtime.plan import Plan
from kernlib.runtime.sequence import Steps


class Rehearsal:
    """The GPUs of an arch, or one of them if a ``device`` is given, and what calls would load."""

    def __init__(self, arch: str, device: int | None = None):
        self.arch, self.device = arch, device
        fewest, most = targets.MULTIPROCESSORS[arch]
        self.model = Model("", fewest) if device is None else devices.model(device)
        self.counts = range(fewest, most + 1) if device is None else (self.model.multiprocessors,)
        self._noted: dict[KernelSpec, None] = {}

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels, each once, in the order in which calls would load them."""
        return list(self._noted)

    def note(self, specs: list[KernelSpec]) -> None:
        self._noted.update(dict.fromkeys(specs))


class Silence:
    """In the place of a plan's launches."""

    def launch(self, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """Nothing."""


_current: ContextVar[Rehearsal | None] = ContextVar("pairwise_rehearsal", default=None)


@contextmanager
def rehearse(arch: str, device: int | None = None) -> Iterator[Rehearsal]:
    """Calls of meta tensors in this block, in this thread, are rehearsed."""
    token = _current.set(Rehearsal(arch, device))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def current() -> Rehearsal | None:
    """The rehearsal of this thread, if there is one."""
    return _current.get()


def on_gpu(t: torch.Tensor) -> bool:
    """Whether kernels compute with a tensor: one on a GPU, or in a rehearsal one that stands for
    such."""
    return t.device.type == "cuda" or (t.device.type == "meta" and _current.get() is not None)


def arch_of(device: int) -> str:
    """:func:`kernlib.runtime.devices.arch_of`."""
    made = _current.get() if device < 0 else None
    return devices.arch_of(device) if made is None else made.arch


def model(device: int) -> Model:
    """:func:`kernlib.runtime.devices.model`; of GPUs that are not here, whose specs do not depend
    on it, that of the smallest."""
    made = _current.get() if device < 0 else None
    return devices.model(device) if made is None else made.model


def lowered(lower: Callable[[int], Lowered | None], device: int) -> Lowered | None:
    """What ``lower`` answers for the number of a device's multiprocessors. Of GPUs that are not
    here the kernels are noted for each number that they may have."""
    made = _current.get() if device < 0 else None
    if made is None:
        return lower(devices.model(device).multiprocessors)
    found = [lower(count) for count in made.counts]
    for each in found:
        made.note([] if each is None else each.specs)
    return found[0]


def build(specs: list[KernelSpec], device: int) -> None:
    """:func:`kernlib.runtime.devices.build`."""
    if device >= 0 or _current.get() is None:
        devices.build(specs, device)


def load_lowered(
    lowered: Lowered, operands: tuple[str, ...], device: torch.device
) -> Plan | Steps | Silence:
    """:func:`kernlib.runtime.sequence.load_lowered`."""
    made = _current.get() if device.type == "meta" else None
    if made is None:
        return sequence.load_lowered(lowered, operands, device)
    made.note(lowered.specs)
    return Silence()
