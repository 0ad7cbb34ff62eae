"""What kernlib knows of CUDA devices: which is current, its target and model, memory on it, and the
kernels that are loaded there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import lru_cache, partial
from threading import Thread
from typing import NamedTuple

import torch

from kernlib.errors import CaptureError, UnsupportedError
from kernlib.jit import service, targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered
from kernlib.runtime import driver, rehearsal
from kernlib.runtime.rehearsal import Rehearsal
from kernlib.settings import current

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_raw_device = getattr(torch._C, "_cuda_getDevice", None)


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _public_device() -> int:
    return torch.cuda.current_device()


# The handle of torch's current stream of a device, and the index of torch's current device. The
# call that torch's compiled code uses takes 0.07 us for the first, the public one 5.6.
current_stream: Callable[[int], int] = _raw_stream or _public_stream
current_device: Callable[[], int] = _raw_device or _public_device

# Another function of torch's compiled code: it makes a strided tensor on the current device,
# without the dispatcher.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
raw_empty = getattr(_guards, "_empty_strided_cuda", None) if _raw_device is not None else None


def allocator(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """A function that makes a new contiguous tensor, uninitialized, at each call. The device must
    be current then. It takes 0.5 us on a host where ``torch.empty`` takes 1.8."""
    if raw_empty is None or device.type != "cuda":
        return partial(torch.empty, shape, dtype=dtype, device=device)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return partial(raw_empty, tuple(shape), strides, dtype)


def arch_of(device: int) -> str:
    """The compile target of a CUDA device, the portable one if KERNLIB_PORTABLE is set. Raises
    UnsupportedError below sm_80, on ROCm and where there is no such device."""
    rehearsed = rehearsal.of(device)
    if rehearsed is not None:
        return rehearsed.arch
    if torch.version.hip is not None:
        raise UnsupportedError("kernlib runs on NVIDIA GPUs and on CPU tensors, not on ROCm")
    try:
        capability = torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError):
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if device < count:
            raise
        raise UnsupportedError(
            f"there is no cuda:{device}: torch sees {count} CUDA devices that it can use"
        ) from None
    arch = targets.arch_of(capability, torch.cuda.get_device_name(device))
    return targets.PORTABLE.get(arch, arch) if current().portable else arch


class Model(NamedTuple):
    """What two GPUs share if the same kernels are fast on both."""

    name: str
    multiprocessors: int


def model(device: int) -> Model:
    """The model of a CUDA device. Of GPUs that are not here it is one without a name, with the
    fewest multiprocessors."""
    rehearsed = rehearsal.of(device)
    if rehearsed is None:
        return real_model(device)
    if rehearsed.device is None:
        return Model("", rehearsed.counts[0])
    return real_model(rehearsed.device)


@lru_cache(maxsize=64)
def real_model(device: int) -> Model:
    """The model of a CUDA device, asked for once."""
    properties = torch.cuda.get_device_properties(device)
    return Model(properties.name, properties.multi_processor_count)


@contextmanager
def rehearse(
    arch: str, device: int | None = None, kind: type[Rehearsal] = Rehearsal
) -> Iterator[Rehearsal]:
    """Calls of meta tensors in this block, in this thread, are rehearsed for all GPUs of an arch,
    or for ``device`` alone. ``kind`` is what notes their kernels."""
    fewest, most = targets.MULTIPROCESSORS[arch]
    if device is not None:
        fewest = most = real_model(device).multiprocessors
    counts = range(fewest, most + 1)
    with rehearsal.entered(kind(arch, device, counts)) as rehearsed:
        yield rehearsed


def lower_on(lower: Callable[[int], Lowered | None], device: int) -> Lowered | None:
    """The result of ``lower`` for a device's number of multiprocessors. In a rehearsal of GPUs that
    are not here the kernels are noted for each number that they may have."""
    rehearsed = rehearsal.of(device)
    if rehearsed is None:
        return lower(real_model(device).multiprocessors)
    results = [lower(count) for count in rehearsed.counts]
    for result in results:
        rehearsed.note(() if result is None else result.specs)
    return results[0]


def load(spec: KernelSpec, device: int) -> service.Kernel:
    """The loaded kernel for a device.

    Raises CaptureError, before the driver is touched, when it would have to be compiled or loaded
    while the current stream is captured; else what :func:`kernlib.jit.service.kernel` raises.
    """
    arch = arch_of(device)
    # In a thread that had no context, one that is bound outside of this guard would change what
    # torch takes for the current device.
    with torch.cuda.device(device):
        kernel = service.loaded(spec, device, arch)
        if kernel is None:
            _refuse_capture(spec, device)
        driver.bind_context(device)
        if kernel is None:
            with driver.range_of(f"kernlib load {spec.description}"):
                kernel = service.kernel(spec, device, arch)
    rehearsal.note_kernel(spec, arch)
    return kernel


def build(specs: list[KernelSpec], device: int) -> None:
    """Find or compile the kernels of one call side by side, so that :func:`load` finds them: NVRTC
    takes 0.3 s for each. What fails here is raised by :func:`load`. In a rehearsal they are
    noted."""
    specs = list(dict.fromkeys(specs))
    rehearsed = rehearsal.of(device)
    if rehearsed is not None:
        return rehearsed.note(specs)
    if len(specs) < 2:
        return
    arch = arch_of(device)
    missing = [spec for spec in specs if service.loaded(spec, device, arch) is None]
    if len(missing) < 2 or torch.cuda.is_current_stream_capturing():
        return

    def work(spec: KernelSpec) -> None:
        with suppress(Exception):
            service.build_ahead(spec, arch)

    # Each thread gets a copy of the context, so that debug=True, a context variable, holds in it
    # too.
    threads = [Thread(target=copy_context().run, args=(work, spec)) for spec in missing[1:]]
    for thread in threads:
        thread.start()
    work(missing[0])
    for thread in threads:
        thread.join()


def unloaded(specs: list[KernelSpec], device: int) -> list[KernelSpec]:
    """The ones of ``specs`` that are not loaded on a device. Raises CaptureError as :func:`load`
    would."""
    arch = arch_of(device)
    missing = [spec for spec in specs if service.loaded(spec, device, arch) is None]
    if missing:
        with torch.cuda.device(device):
            _refuse_capture(missing[0], device)
    return missing


def _refuse_capture(spec: KernelSpec, device: int) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{spec.description} is not loaded on cuda:{device}, and nothing is compiled or "
            "loaded while a CUDA graph is captured: call kernlib.prepare with the same "
            "arguments, or the kernel once, before the capture"
        )
