"""Plans: the prepared call of one kernel for one signature of tensors.

A plan holds what does not change between calls: function, grid, block and the by-value parameter
struct, of which a call rewrites the head (pointers and numbers). One by-value struct costs 4.9 us a
launch where 25 separate arguments cost 11.3.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib import events
from kernlib.errors import CaptureError, UnsupportedError
from kernlib.jit import service, targets
from kernlib.jit.spec import KernelSpec

if TYPE_CHECKING:
    from kernlib.tensor_map import Encoder, TensorMap

PLANS = 1024  # of one thread; past that the oldest goes, and is rebuilt in 0.1 ms

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of an encoded tensor map

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_raw_device = getattr(torch._C, "_cuda_getDevice", None)


def current_stream(device: int) -> int:
    """Handle of torch's current stream: 0.07 us by the call that torch's compiled code uses, 5.6 by
    the public one."""
    if _raw_stream is not None:
        return _raw_stream(device)
    return torch.cuda.current_stream(device).cuda_stream


def current_device() -> int:
    """Index of torch's current CUDA device."""
    return _raw_device() if _raw_device is not None else torch.cuda.current_device()


def arch_of(device: int) -> str:
    """The compile target of a CUDA device. Raises UnsupportedError below sm_80 and on ROCm."""
    if torch.version.hip is not None:
        raise UnsupportedError("kernlib runs on NVIDIA GPUs and on CPU tensors, not on ROCm")
    capability = torch.cuda.get_device_capability(device)
    return targets.arch_of(capability, torch.cuda.get_device_name(device))


class Model(NamedTuple):
    """What two GPUs share if the same kernels are fast on both."""

    name: str
    multiprocessors: int


@lru_cache(maxsize=64)
def model(device: int) -> Model:
    """The model of a CUDA device, asked for once."""
    found = torch.cuda.get_device_properties(device)
    return Model(found.name, found.multi_processor_count)


def load(spec: KernelSpec, device: int) -> service.Kernel:
    """The loaded kernel for a device.

    Raises CaptureError, before the driver is touched, when it would have to be compiled or loaded
    while the current stream is captured; else what :func:`kernlib.jit.service.kernel` raises.
    """
    arch = arch_of(device)
    found = service.loaded(spec, device, arch)
    if found is not None:
        _bind_context(device)
        return found
    with torch.cuda.device(device):
        _refuse_capture(spec, device)
        _bind_context(device)
        return service.kernel(spec, device, arch)


def unloaded(specs: list[KernelSpec], device: int) -> list[KernelSpec]:
    """Those that are not loaded on a device. Raises CaptureError as :func:`load` would."""
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


def _bind_context(device: int) -> None:
    """Give a fresh thread a CUDA context: torch binds one only when it calls the runtime, which a
    thread that has allocated nothing has not done, and a driver launch without one fails."""
    from cuda.bindings import driver

    if int(driver.cuCtxGetCurrent()[1]) == 0:
        handle = driver.cuDeviceGet(device)[1]
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(handle)[1])


class Plan:
    """One kernel, its grid and its parameter block, for the thread that made it.

    The block starts with an encoded tensor map for each of ``maps``, then ``pointers`` addresses,
    then numbers in the struct format ``numbers``, then ``fixed`` bytes. A launch rewrites maps and
    addresses, and the numbers where it is given some.
    """

    __slots__ = (
        "_block", "_encoders", "_function", "_mapped", "_numbers", "_pointers", "device", "grid",
        "kernel",
    )  # fmt: skip

    def __init__(
        self,
        kernel: service.Kernel,
        device: int,
        grid: tuple[int, int],
        pointers: int,
        numbers: str,
        fixed: bytes,
        maps: tuple[TensorMap, ...] = (),
    ):
        self.kernel, self.device, self.grid = kernel, device, grid
        self._pointers = struct.Struct(f"<{pointers}Q")
        self._numbers = struct.Struct("<" + numbers)
        size = self._pointers.size + self._numbers.size
        whole = MAP_BYTES * len(maps) + size + len(fixed)
        # Behind as many bytes as put the maps at an address that they may have.
        memory = ctypes.create_string_buffer(whole + MAP_ALIGNMENT)
        start = -ctypes.addressof(memory) % MAP_ALIGNMENT
        first = ctypes.addressof(memory) + start
        self._encoders = _encoders(maps, first) if maps else []
        self._mapped: tuple[int, ...] = ()  # addresses that the maps hold
        place = start + MAP_BYTES * len(maps)
        memory[place + size : place + size + len(fixed)] = fixed
        arguments = (ctypes.c_void_p * 1)(first)
        spec = kernel.spec
        shape = (kernel.function, *grid, 1, spec.threads, 1, 1, spec.shared_bytes)
        self._function = (shape, ctypes.addressof(arguments), _cu_launch_kernel())
        self._block = (memory, place, place + self._pointers.size, arguments)

    def launch(self, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """Launch on torch's current stream of the plan's device. ``pointers`` are those of the maps,
        then the block's own. Without ``numbers``, those of the last call stay: pass them always, or
        never, when they are 0."""
        memory, place, numbers_place, _ = self._block
        if self._encoders:
            count = len(self._encoders)
            if pointers[:count] != self._mapped:
                self._encode(pointers[:count])
            pointers = pointers[count:]
        self._pointers.pack_into(memory, place, *pointers)
        if numbers is not None:
            self._numbers.pack_into(memory, numbers_place, *numbers)
        if current_device() == self.device:
            self.repeat()
        else:
            with torch.cuda.device(self.device):
                self.repeat()
        if events.listening():
            self._report()

    def _encode(self, addresses: tuple[int, ...]) -> None:
        self._mapped = ()  # should one be refused
        for encode, address in zip(self._encoders, addresses, strict=True):
            encode(address)
        self._mapped = addresses

    def repeat(self) -> None:
        """Launch with what the last :meth:`launch` was given, on the plan's device, which must be
        current; listeners to events do not hear of it."""
        shape, arguments, function = self._function
        status = function(*shape, current_stream(self.device), arguments, 0)[0]
        if status != 0:
            raise RuntimeError(f"launch of {self.kernel.spec.description} failed: {status.name}")

    def _report(self) -> None:
        kernel, spec = self.kernel, self.kernel.spec
        grid = f"{self.grid[0]}x{self.grid[1]}"
        events.emit(
            "launch", kernel.key, kernel.arch, spec.description, grid=grid, block=spec.threads
        )


def _encoders(maps: tuple[TensorMap, ...], address: int) -> list[Encoder]:
    """Those that write the maps one behind the other. Kernels without maps do not load them."""
    from kernlib.tensor_map import Encoder

    return [Encoder(each, address + MAP_BYTES * index) for index, each in enumerate(maps)]


@lru_cache(maxsize=1)
def _cu_launch_kernel() -> Callable:
    from cuda.bindings.driver import cuLaunchKernel

    return cuLaunchKernel


class _Table:
    """The plans of one thread, in a dict of its own that :func:`forget_plans` finds."""

    __slots__ = ("__weakref__", "plans")

    def __init__(self) -> None:
        self.plans: dict = {}
        _tables[id(self)] = self


_tables: weakref.WeakValueDictionary[int, _Table] = weakref.WeakValueDictionary()


class PlanCache(threading.local):
    """Plans of the calling thread: a plan's parameter block serves one launch at a time."""

    def __init__(self) -> None:
        self._table = _Table()  # goes with its thread
        self.plans = self._table.plans

    def keep(self, key: tuple, plan: object) -> None:
        if len(self.plans) >= PLANS:
            for oldest in list(self.plans)[:1]:  # none, if another thread just forgot them
                self.plans.pop(oldest, None)
        self.plans[key] = plan


def forget_plans() -> None:
    """Drop the plans of all threads: their next calls choose their kernels anew. A call that is
    making its plan meanwhile may keep it."""
    for reference in _tables.valuerefs():
        table = reference()
        if table is not None:
            table.plans.clear()
