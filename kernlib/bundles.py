"""Bundles of all kernels that a part of a program uses: see :func:`recording`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kernlib.ahead import build_all, check_workers
from kernlib.descriptors.base import check_flag
from kernlib.descriptors.base import shown as in_words
from kernlib.errors import KernlibWarning
from kernlib.hints.calls import hinted
from kernlib.jit import bundle, layers, targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered
from kernlib.progress import check as check_progress
from kernlib.runtime import ahead, devices, rehearsal
from kernlib.runtime.plan import forget_plans
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.rehearsal import Rehearsal

SHOWN_FAILURES = 4


@hinted
@contextmanager
def recording(
    folder: str | os.PathLike[str],
    *,
    archs: str | Sequence[str] | None = None,
    replace: bool = False,
    workers: int | None = None,
    progress: bool | None = None,
) -> Iterator[None]:
    """Write all kernels that the block uses into a bundle, with which the same calls elsewhere
    compile nothing: with ``KERNLIB_CACHE_DIR=$HOME/.cache/kernlib:/path/to/bundle``, the cache
    first and the bundle behind it.

    Calls on CUDA tensors are recorded, of all threads of this process, backward passes included.
    The program may have run before: the block drops all plans, so each call makes its plan again,
    which compiles nothing here. Recordings may be nested, and open in several threads; each has all
    calls from its begin to its end.

    ``archs`` are targets such as ``"sm_80"``, by default those of the GPUs that the block uses.
    Each call is planned for each of them, which takes some milliseconds the first time, because
    other GPUs may take other kernels. As with :func:`kernlib.compile` the bundle holds those of the
    smallest to the largest GPU of a target. It also holds the very kernels that ran, such as those
    that :func:`kernlib.tune` has chosen, if ``archs`` has the target of their GPU. It lacks

    - kernels of other sizes, dtypes and layouts, where the choice of a kernel depends on these;
    - kernels of calls that other GPUs alone make: the program asks which GPU it has, or torch
      computes here what kernels compute there;
    - kernels of a CUDA graph that was captured before: record its capture, or a step without it.

    ``folder`` is made before the block. The bundle in it is written as a whole, after the block,
    unless that raises. ``replace=True`` permits a folder that has a bundle, which is replaced.
    Kernels that the cache lacks are compiled after the block, for GPUs that are not here too, by
    ``workers`` threads and with ``progress`` as in :func:`kernlib.compile`.

    Raises before the block ValueError for an unknown arch, FileExistsError for a folder that has a
    bundle or is a cache, other OSErrors for one that cannot be written, or that others may write.
    Raises after it RuntimeError if no kernel was used, else what :func:`kernlib.compile` raises. A
    call that cannot be planned for one of ``archs`` is left out there, with a KernlibWarning.

    :func:`kernlib.prepare` loads the kernels of single calls into this process, which a CUDA graph
    needs; :func:`kernlib.compile` and ``kernlib compile`` compile calls that nobody makes.

    Example:
        >>> x = torch.randn(100, 8, requires_grad=True)
        >>> with kl.recording("bundle", archs=("sm_80", "sm_90a")):  # doctest: +SKIP
        ...     kl.cdist(x.cuda(), x.cuda()).sum().backward()
    """
    path, targeted = _path(folder), _targets(archs)
    check_flag("replace", replace)
    check_workers(workers)
    check_progress(progress)
    bundle.refuse_target(path, replace, "replace=True replaces it")
    bundle.make_folder(path)
    recorder = _Recorder(targeted)
    rehearsal.recorders.append(recorder)
    try:
        forget_plans()  # calls are heard of where they make their plans
        yield
    finally:
        rehearsal.recorders.remove(recorder)
    jobs = recorder.jobs()
    if recorder.failures:
        text = f"the bundle may lack kernels: {_left_out(recorder.failures)}"
        warnings.warn(text, KernlibWarning, stacklevel=3)
    entries = build_all(jobs, workers, progress)
    keys = [layers.request_of(*job).portable for job in jobs]
    bundle.write(path, dict(zip(keys, map(bundle.shipped, entries), strict=True)))


def _path(folder: str | os.PathLike[str]) -> Path:
    """An absolute path, since the block may change the working directory."""
    try:
        return Path(folder).expanduser().absolute()
    except TypeError:
        raise TypeError(f"folder must be a path, got {in_words(folder)}") from None


def _targets(archs: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if archs is None:
        return None
    several = tuple(archs) if isinstance(archs, (list, tuple)) else (archs,)
    if not several:
        raise ValueError("archs names no target; leave it out for those of the GPUs in use")
    return tuple(dict.fromkeys(map(targets.check_arch, several)))


class _Recorder:
    """The calls and kernels noted for an open block. Its methods run in any thread."""

    def __init__(self, archs: tuple[str, ...] | None):
        self.archs = archs
        self.failures: dict[str, None] = {}  # what was left out, and why
        self._kernels: dict[tuple[KernelSpec, str], None] = {}
        self._calls: set[tuple] = set()
        self._is_used = False

    def note_kernel(self, spec: KernelSpec, arch: str) -> None:
        self._is_used = True
        if self.archs is None or arch in self.archs:
            self._kernels[spec, arch] = None

    def note_call(self, call: Callable, arguments: tuple, device: int) -> None:
        for arch in self._archs(device):
            with self._failing(arch), ahead.unseen(), devices.rehearse(arch) as rehearsed:
                stand_ins = ahead.StandIns().of(arguments)
                settings = float32_precision(), torch.are_deterministic_algorithms_enabled()
                if self._is_new((arch, call, settings, _described(stand_ins))):
                    call(*stand_ins)
                    self._note(rehearsed.specs, arch)

    def note_lowering(self, lower: Callable[[], Lowered], device: int) -> None:
        for arch in self._archs(device):
            fewest, most = targets.MULTIPROCESSORS[arch]
            for count in range(fewest, most + 1):
                posing = Rehearsal(arch, None, (count,), poses=True)
                with self._failing(arch), rehearsal.entered(posing):
                    self._note(lower().specs, arch)

    def jobs(self) -> list[tuple[KernelSpec, str]]:
        """The kernels to write, each for its arch. Raises RuntimeError without any."""
        if not self._is_used:
            raise RuntimeError(
                "the recorded block used no kernel of kernlib, so no bundle is written: record a "
                "step that calls kernlib on CUDA tensors (torch computes calls of CPU tensors), "
                "and not the replay of a CUDA graph that was captured before"
            )
        if not self._kernels:
            raise RuntimeError(f"no bundle is written: {_left_out(self.failures)}")
        return list(self._kernels)

    def _archs(self, device: int) -> tuple[str, ...]:
        return self.archs or (devices.arch_of(device),)

    def _note(self, specs: Sequence[KernelSpec], arch: str) -> None:
        self._kernels.update(((spec, arch), None) for spec in specs)

    def _is_new(self, call: tuple) -> bool:
        """Whether a call was not there before, as one whose layouts have no hash never was."""
        count = len(self._calls)
        try:
            self._calls.add(call)
        except TypeError:
            return True
        return len(self._calls) > count

    @contextmanager
    def _failing(self, arch: str) -> Iterator[None]:
        """The step of the program goes on, whatever is wrong with its call on another GPU."""
        try:
            yield
        except Exception as error:
            self.failures[f"{arch}: {error}"] = None


def _described(value: object) -> object:
    """The properties of arguments on which a rehearsed call depends."""
    if isinstance(value, torch.Tensor):
        strides = value.stride(), value.storage_offset()
        return tuple(value.shape), *strides, value.dtype, value.requires_grad
    if isinstance(value, dict):
        return tuple((name, _described(item)) for name, item in value.items())
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else value


def _left_out(failures: dict[str, None]) -> str:
    texts = [*failures][:SHOWN_FAILURES]
    more = f"; and {len(failures) - len(texts)} more" if len(failures) > len(texts) else ""
    return f"calls that could not be planned for a target: {'; '.join(texts)}{more}"
