"""Kernels that a first call needs later than the one it waits for, compiled meanwhile: those of its
backward pass, and of the products behind its first one.

Where a kernel turns out not to be in the cache, the call is made once more in another thread, of
meta tensors (:mod:`kernlib.runtime.rehearsal`), and the kernels that it notes are compiled there,
at a lower priority. What fails there is raised where a call needs that kernel. The threads end with
the compile that they are in where a process ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from contextvars import ContextVar, copy_context

import torch

from kernlib.jit import service
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import devices, rehearsal
from kernlib.runtime.rehearsal import Rehearsal

NAME = "kernlib-early"  # of the threads
NICENESS = 5  # of the threads: a third of a contended core

_rehearsed: ContextVar[bool] = ContextVar("kernlib_early", default=False)


def first(call: Callable, *arguments, again: tuple | None = None):
    """The result of ``call(*arguments)``, the first call of its signature; calls inside it are part
    of it. ``again`` is another function, with its arguments, that stands for the whole call where
    ``call`` is the inside of a function of torch.autograd."""
    if _rehearsed.get():
        return _with_backward(call(*arguments))
    if service.missed.get() is not None or rehearsal.current() is not None:
        return call(*arguments)
    records = again is not None or torch.is_grad_enabled()
    token = service.missed.set(_Beginning(records, *(again or (call, *arguments))).begin)
    try:
        return call(*arguments)
    finally:
        service.missed.reset(token)


def _with_backward(result):
    """The result of a rehearsed call, whose backward pass is rehearsed too: of a gradient that lies
    as the result does, and of one as ``sum()`` makes it. The node is called by itself, without
    autograd's threads."""
    y, *rest = result if isinstance(result, tuple) else (result,)
    backward = getattr(getattr(y, "grad_fn", None), "apply", None)
    if backward is not None:
        scalar = torch.empty((), dtype=y.dtype, device=y.device)
        with torch.no_grad(), suppress(Exception):
            for grad in (rehearsal.like(y), scalar.expand(y.shape)):
                backward(grad, *[None] * len(rest))
    return result


class _Beginning:
    """A call whose kernels may be missing."""

    def __init__(self, records: bool, call: Callable, *arguments):
        self._records, self._call, self._arguments = records, call, arguments
        self._begun = threading.Lock()

    def begin(self) -> None:
        """Begin to compile, unless that has begun."""
        # Anomaly detection, which is one for all threads, would look at meta tensors.
        if not self._begun.acquire(blocking=False) or torch.is_anomaly_enabled():
            return
        from kernlib.runtime.ahead import StandIns  # calls from the cache need none

        with suppress(Exception), torch.no_grad():
            stand_ins = StandIns()
            arguments, device = stand_ins.of(self._arguments), stand_ins.device
            if device is not None and device.type == "cuda":
                context = copy_context()
                context.run(service.missed.set, None)
                context.run(_start, self._rehearse, arguments, device.index)

    def _rehearse(self, arguments: tuple, device: int) -> None:
        arch = devices.arch_of(device)
        _rehearsed.set(True)
        with (
            service.apart_from_forks(),
            devices.rehearse(arch, device, _Compiled),
            torch.set_grad_enabled(self._records),
        ):
            _with_backward(self._call(*arguments))


def _other_cores() -> threading.BoundedSemaphore:
    """All cores but the one that is left to the call."""
    return threading.BoundedSemaphore(max(1, len(os.sched_getaffinity(0)) - 1))


_cores = _other_cores()


class _Compiled(Rehearsal):
    """A rehearsal whose kernels are compiled from the moment at which they are noted."""

    def note(self, specs: Iterable[KernelSpec]) -> None:
        new = [spec for spec in specs if spec not in self.specs]
        super().note(new)
        for spec in new:
            if service.loaded(spec, self.device, self.arch) is None:
                _start(self._build, spec)

    def _build(self, spec: KernelSpec) -> None:
        with _cores:
            if threading.main_thread().is_alive():
                os.nice(NICENESS)  # this thread alone
                service.build(spec, self.arch)


def _start(work: Callable, *arguments) -> None:
    """Begin work in a thread, in a copy of the context; whatever it raises is a call's to raise."""

    def run() -> None:
        with suppress(Exception):
            work(*arguments)

    threading.Thread(target=copy_context().run, args=(run,), name=NAME).start()


def _after_in_child() -> None:
    """The threads that held cores do not exist here."""
    global _cores
    _cores = _other_cores()


os.register_at_fork(after_in_child=_after_in_child)
