"""Compiling before anybody calls: for GPUs that are not here, and for those that are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernlib import events
from kernlib.descriptors.base import Descriptor, check_flag, whole
from kernlib.descriptors.base import shown as in_words
from kernlib.errors import UnsupportedError
from kernlib.hints import spelling
from kernlib.jit import service, targets
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec
from kernlib.progress import check as check_progress
from kernlib.progress import shown
from kernlib.run import operation_of, run_of
from kernlib.runtime import ahead, devices
from kernlib.runtime.ahead import Candidates, Planned

if TYPE_CHECKING:
    from typing_extensions import Never

    from kernlib.families.blocksparse.layout import Layout
    from kernlib.families.sparse.matrix import SparseMatrix


def compile(
    descriptors: Descriptor | Sequence[Descriptor],
    *misplaced: Never,
    archs: str | tuple[str, ...] | list[str] = ("sm_90a",),
    specs: torch.Tensor | tuple[torch.Tensor | Layout | SparseMatrix, ...] | None = None,
    dtypes: torch.dtype | tuple[torch.dtype, ...] = (torch.float32,),
    workers: int | None = None,
    progress: bool | None = None,
    debug: bool = False,
    **arguments: Any,
) -> list[Entry]:
    """Compile kernels of ``descriptors``, one or several, into the cache, for GPUs that need not be
    here: those of ``archs``, targets such as ``"sm_80"``.

    ``specs`` are tensors as for :func:`kernlib.run_kernel`, () where all have names, as those of a
    :class:`kernlib.Formula`, and ``arguments`` the call's other arguments. The data of the tensors
    is not read, so ``meta`` tensors will do. With them, what is compiled are the kernels that this
    call uses on any GPU of each arch, from the smallest to the largest, unless :func:`kernlib.tune`
    has chosen others there.

    Without ``specs``, every variant of each descriptor is compiled, for inputs of ``dtypes``. For
    kernel matrices this leaves out gradients and reductions. It makes some 36 kernels for a
    descriptor without Power stages, twice as many for half types, and hundreds with Power stages. A
    kernel takes a quarter of a second.

    - If tensors require a gradient, the kernels of the backward pass are compiled too, for the
      gradients of these tensors: from an incoming gradient that lies in memory as the result does,
      and from one as ``sum()`` makes it.
    - ``reduction="kernel_matmul"``, or another function that reduces a kernel matrix, stands for a
      call of that function in place of :func:`kernlib.run_kernel`, with its arguments:
      ``specs=(a, b, v)``, without b for a symmetric descriptor.

    ``workers`` threads compile, by default one for each core that the process may use.
    ``progress`` shows a bar on stderr if that is a terminal or a notebook's, else a line every ten
    seconds, which work of less than that does not reach. False shows nothing, True the end too.
    ``debug=True`` writes a line to stderr for each event. ``misplaced`` takes nothing: tensors go
    into ``specs``.

    :func:`kernlib.recording` compiles the calls that a program makes, into a bundle.

    Returns the entries in order. The first failure cancels what has not begun and is raised:
    CompileError, or UnsupportedError when no compiler is installed. Raises ValueError for an
    unknown arch, TypeError and ValueError for bad arguments.

    Example:
        >>> x = torch.empty(100, 8, device="meta")
        >>> entries = kl.compile(kl.gaussian(), archs="sm_80", specs=(x, x), bandwidth=1.0)
        >>> [entry.meta["description"] for entry in entries]
        ['gaussian few pairs float32']
    """
    _check_named(misplaced, arguments, descriptors)
    if specs is None and arguments:
        named = ", ".join(arguments)
        raise TypeError(f"{named}: arguments of a call need its tensors, as in specs=(a, b)")
    _check_options(workers, progress, debug)
    targeted = [targets.check_arch(arch) for arch in _several(archs)]
    jobs = [
        (spec, arch)
        for descriptor in _several(descriptors)
        for arch in targeted
        for spec in _listed(descriptor, arch, specs, _several(dtypes), arguments)
    ]
    with events.on_stderr() if debug else nullcontext():
        return build_all(jobs, workers, progress)


def prepare(
    descriptors: Descriptor | Sequence[Descriptor],
    *tensors: torch.Tensor | Layout | SparseMatrix,
    workers: int | None = None,
    progress: bool | None = None,
    debug: bool = False,
    **arguments: Any,
) -> None:
    """Compile and load what :func:`kernlib.run_kernel` would use for these ``tensors`` and
    ``arguments``, with each of ``descriptors``, one or several, and launch nothing. Gradients and a
    ``reduction`` are asked for as in :func:`kernlib.compile`.

    After it the same call, on any stream, may be captured in a CUDA graph. ``meta`` tensors stand
    for tensors of the current CUDA device with the same shapes, strides and offsets. CPU tensors
    are checked; for them nothing is compiled. ``workers``, ``progress`` and ``debug`` are those of
    :func:`kernlib.compile`; the calling thread loads what the workers have compiled.

    :func:`kernlib.recording` around one step of a program takes all its kernels to other machines,
    without a list of its calls.

    Raises what :func:`kernlib.run_kernel` raises, CaptureError if something is not loaded while the
    stream captures a CUDA graph, and UnsupportedError for ``meta`` tensors without a usable GPU.

    Example:
        >>> x = torch.randn(100, 8)
        >>> kl.prepare(kl.gaussian(), x, x, bandwidth=1.0)  # on a GPU its kernel is loaded then
        >>> kl.run_kernel(kl.gaussian(), x, x, bandwidth=1.0).shape
        torch.Size([100, 100])
    """
    _check_options(workers, progress, debug)
    with events.on_stderr() if debug else nullcontext():
        listed = _several(descriptors)
        waiting = [d for d in listed if not prepared(d, *tensors, **arguments)]
        device = _device_of(tensors) if waiting else None
        if device is not None:
            arch = devices.arch_of(device)
            lists = [specs(d, arch, tensors, arguments, device) for d in waiting]
            missing = devices.unloaded([spec for group in lists for spec in group], device)
            build_all([(spec, arch) for spec in missing], workers, progress)
            for spec in missing:
                devices.load(spec, device)
        if device is None or tensors[0].device.type != "meta":
            for descriptor in waiting:
                planned = _planned(descriptor, tensors, arguments)
                if device is None and not planned:
                    specs(descriptor, "sm_80", tensors, arguments)  # raises what is wrong
                for product in planned:
                    ahead.prepare(product)


def prepared(
    descriptor: Descriptor, *tensors: torch.Tensor | Layout | SparseMatrix, **arguments: Any
) -> bool:
    """Whether :func:`prepare` has nothing to do for a call: its plans are there, or torch computes
    it. False for reductions, for calls whose gradient would be recorded and for ``meta`` tensors:
    their kernels are looked for each time. Raises what a call raises."""
    on_meta = bool(tensors) and getattr(tensors[0], "device", None) == torch.device("meta")
    # Autocast casts meta tensors as it would those of a GPU.
    with devices.rehearse("sm_80") if on_meta else nullcontext():
        planned = _planned(descriptor, tensors, arguments)
        return bool(planned) and all([ahead.is_prepared(product) for product in planned])


def specs(
    descriptor: Descriptor, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors uses on the GPUs of an arch, untuned, or on
    ``device`` alone, as it is tuned, with those of the gradients that would be recorded: see
    :func:`compile`. The call is made on ``meta`` tensors in their place. Raises what it raises."""
    stand_ins, call_of = ahead.StandIns(), getattr(operation_of(descriptor), "call_of", None)
    with ahead.unseen(), devices.rehearse(arch, device) as rehearsal:
        tensors, arguments = stand_ins.of(tuple(tensors)), stand_ins.of(arguments)
        if call_of is None:
            call = partial(run_of(descriptor), descriptor, *tensors, **arguments)
        else:
            call = call_of(descriptor, tensors, arguments)
        _planned(descriptor, tensors, arguments)  # raises what is wrong with names and kinds
        results = call()
        for result in results if isinstance(results, tuple) else (results,):
            _rehearse_backward(result, stand_ins.leaves)
    return rehearsal.specs


def _rehearse_backward(result: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """The backward pass of a result, if it has one: of a gradient that lies as the result does, and
    of one whose elements are all one, as ``sum()`` makes it."""
    if not result.requires_grad:
        return
    scalar = torch.empty((), dtype=result.dtype, device=result.device)
    for gradient in (torch.empty_like(result), scalar.expand(result.shape)):
        torch.autograd.grad(result, leaves, gradient, retain_graph=True, allow_unused=True)


def variants(
    descriptor: Descriptor, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and inputs of ``dtypes``. Raises
    KeyError for dtypes that it does not take."""
    return operation_of(descriptor).variants(descriptor, arch, dtypes)


def candidates(
    descriptor: Descriptor, *tensors: torch.Tensor | Layout | SparseMatrix, **arguments: Any
) -> Candidates:
    """The kernels that could compute a call, none for a result without elements; see
    :func:`kernlib.tune`. Raises what a call raises, UnsupportedError for what torch computes, and
    TypeError for a chain of several kernels, of which one factor is tuned at a time."""
    planned = _planned(descriptor, tensors, arguments)
    if not planned and "reduction" in arguments:
        raise TypeError("reduction is no argument of tune, which times calls of run_kernel alone")
    if not planned:
        raise UnsupportedError(
            f"torch computes {descriptor.describe()} where a gradient is recorded, and there are "
            "no kernels to time: call under torch.no_grad()"
        )
    if type(planned[0].request[0]) is not type(descriptor):  # a chain, of which it is one factor
        raise TypeError(
            f"{descriptor.describe()} is several kernels: tune its factors one at a time"
        )
    return ahead.candidates(planned[0])


def _planned(descriptor: Descriptor, tensors: tuple, arguments: dict) -> list[Planned]:
    return operation_of(descriptor).planned(descriptor, tensors, arguments)


def build_all(
    jobs: list[tuple[KernelSpec, str]], workers: int | None, progress: bool | None
) -> list[Entry]:
    """The entry of each job. Equal jobs are built once, by a pool of threads: NVRTC releases the
    GIL. Raises the first failure, and begins nothing after it."""
    check_workers(workers)
    keys = [(spec.canonical(), arch) for spec, arch in jobs]
    distinct = dict(zip(keys, jobs, strict=True))
    if not jobs:
        return []
    count = min(workers or len(os.sched_getaffinity(0)), len(distinct))
    pool = ThreadPoolExecutor(count, thread_name_prefix="kernlib-compile")
    failures: list[Exception] = []
    with shown(progress, "compiling", len(distinct)) as bar:

        def build(spec: KernelSpec, arch: str) -> Entry | None:
            try:
                what = f"{arch} {spec.description}"
                return None if failures else bar.count(what, lambda: service.build(spec, arch))
            except Exception as error:
                failures.append(error)

        try:
            # Each thread gets a copy of the context, so that debug=True, a context variable, holds
            # in it too.
            futures = {
                key: pool.submit(copy_context().run, build, *job) for key, job in distinct.items()
            }
            wait(futures.values())
        finally:
            pool.shutdown(cancel_futures=True)
    if failures:
        raise failures[0]
    return [futures[key].result() for key in keys]


def _check_named(misplaced: tuple, arguments: dict, descriptors) -> None:
    """Raises TypeError for positional arguments of :func:`compile`, and for a keyword that looks
    like a misspelling of one of its own."""
    if misplaced:
        raise TypeError(
            f"compile() got {len(misplaced)} unexpected positional argument(s): tensors are its "
            "specs, as in compile(descriptor, specs=(a, b), bandwidth=1.0), and several "
            "descriptors a list"
        )
    instances = [item for item in _several(descriptors) if isinstance(item, Descriptor)]
    required = {name for descriptor in instances for name in descriptor.required}
    for name in {*arguments} - required:
        if hint := spelling.argument(name, ("archs", "specs", "dtypes", "workers", "progress")):
            raise TypeError(f"compile() got an unexpected keyword argument {name!r}{hint}")


def _check_options(workers, progress, debug) -> None:
    """Raises TypeError and ValueError."""
    check_workers(workers)
    check_progress(progress)
    check_flag("debug", debug)


def check_workers(workers: int | None) -> None:
    """Raises TypeError and ValueError for what is neither a positive int nor None."""
    if workers is None:
        return
    number = whole(workers)
    if number is None:
        raise TypeError(f"workers must be a positive int or None, got {in_words(workers)}")
    if number < 1:
        raise ValueError(
            f"workers must be a positive int, got {in_words(number)}; None takes one a core"
        )


def _device_of(tensors: tuple) -> int | None:
    """The GPU to prepare: that of the tensors, or the current one for ``meta`` tensors. None for
    others: the family then checks CPU tensors, and says what is wrong with anything else."""
    place = getattr(tensors[0], "device", None) if tensors else None
    if not isinstance(place, torch.device):
        return None
    if place.type == "cuda":
        return place.index
    return _current_device() if place.type == "meta" else None


def _current_device() -> int:
    advice = (
        "meta tensors are prepared for the current CUDA device, and kernlib.compile(descriptors, "
        "archs=..., specs=tensors) builds for GPUs that are not here"
    )
    if not torch.cuda.is_available():
        raise UnsupportedError(f"torch sees no CUDA device that it can use; {advice}")
    device = torch.cuda.current_device()
    try:
        devices.arch_of(device)
    except UnsupportedError as error:
        raise UnsupportedError(f"{error} Note that {advice}") from None
    return device


def _several(value) -> tuple:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _listed(descriptor: Descriptor, arch: str, operands, dtypes: tuple, arguments: dict) -> list:
    if operands is None:
        for dtype in dtypes:
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"dtypes must be torch dtypes, got {in_words(dtype)}")
        try:
            return variants(descriptor, arch, dtypes)
        except KeyError as error:
            raise TypeError(f"dtypes: {descriptor.family} has no kernels for {error}") from None
    tensors = _several(operands)
    # Compressed matrices and layouts hold tensors.
    are_operands = [isinstance(t, torch.Tensor) or hasattr(t, "tensors") for t in tensors]
    by_name = any([isinstance(t, torch.Tensor) for t in arguments.values()])  # as formulas are
    if not (tensors or by_name) or not all(are_operands):
        kinds = ", ".join(type(t).__name__ for t in tensors) or "none"
        raise TypeError(f"specs must be the tensors of one call, got {kinds}")
    places = dict.fromkeys(str(t.device) for t in tensors)
    if len(places) > 1:
        raise ValueError(f"specs must be on one device, got {' and '.join(places)}")
    return specs(descriptor, arch, tensors, arguments)
