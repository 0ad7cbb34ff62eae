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
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib import events
from kernlib.errors import CaptureError, UnsupportedError
from kernlib.jit import service, targets
from kernlib.jit.spec import KernelSpec

if TYPE_CHECKING:
    from kernlib.lowering.tma import TensorMap

PLANS = 1024  # of one thread; past that the oldest goes, and is rebuilt in 0.1 ms

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of an encoded tensor map
KNOWN_MAPS = 16  # addresses at which a plan keeps one of its maps encoded

OVERLAPS_FROM = 12030  # of the driver: older ones capture no launch that overlaps in a CUDA graph

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_raw_device = getattr(torch._C, "_cuda_getDevice", None)


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _public_device() -> int:
    return torch.cuda.current_device()


# Handle of torch's current stream of a device, in 0.07 us by the call that torch's compiled code
# uses, 5.6 by the public one; and index of torch's current device.
current_stream: Callable[[int], int] = _raw_stream or _public_stream
current_device: Callable[[], int] = _raw_device or _public_device

# Also of torch's compiled code: a strided tensor on the current device, past the dispatcher.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_raw_empty = getattr(_guards, "_empty_strided_cuda", None) if _raw_device is not None else None


def allocator(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], torch.Tensor]:
    """What makes one new contiguous tensor after the other, uninitialized, on a device that must be
    current when it is called: in 0.5 us on a host where ``torch.empty`` takes 1.8."""
    if _raw_empty is None or device.type != "cuda":
        return partial(torch.empty, shape, dtype=dtype, device=device)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return partial(_raw_empty, tuple(shape), strides, dtype)


def arch_of(device: int) -> str:
    """The compile target of a CUDA device. Raises UnsupportedError below sm_80, on ROCm and where
    there is no such device."""
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
    # A context that is bound outside of the guard would be what torch takes for the current device
    # in a thread that had none.
    with torch.cuda.device(device):
        found = service.loaded(spec, device, arch)
        if found is None:
            _refuse_capture(spec, device)
        _bind_context(device)
        return service.kernel(spec, device, arch) if found is None else found


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
    thread that has allocated nothing has not done, and a driver launch without one fails. The
    device must be current, or torch would take it for that from now on."""
    from cuda.bindings import driver

    if int(driver.cuCtxGetCurrent()[1]) == 0:
        handle = driver.cuDeviceGet(device)[1]
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(handle)[1])


class Plan:
    """One kernel, its grid and its parameter block, for the thread that made it.

    The block starts with an encoded tensor map for each of ``maps``, then ``pointers`` addresses,
    then numbers in the struct format ``numbers``, then ``fixed`` bytes. A launch rewrites maps and
    addresses, and the numbers where it is given some.

    A plan that ``overlaps`` may begin before the launch before it on its stream has ended: its
    kernel waits for that by ``griddepcontrol.wait``, and the one before permits it.
    """

    __slots__ = (
        "_function", "_launch", "_maps", "_memory", "_overlaps", "_shape", "_stream", "_write",
        "_write_numbers", "device", "grid", "kernel",
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
        overlaps: bool = False,
    ):
        self.kernel, self.device, self.grid = kernel, device, grid
        addresses = struct.Struct(f"@{pointers}P")
        behind = struct.Struct("<" + numbers)
        size = addresses.size + behind.size
        whole = MAP_BYTES * len(maps) + size + len(fixed)
        # Behind as many bytes as put the maps at an address that they may have.
        memory = ctypes.create_string_buffer(whole + MAP_ALIGNMENT)
        start = -ctypes.addressof(memory) % MAP_ALIGNMENT
        first = ctypes.addressof(memory) + start
        place = start + MAP_BYTES * len(maps)
        memory[place + size : place + size + len(fixed)] = fixed
        self._maps = _Maps(maps, memory, start) if maps else None
        self._write = partial(addresses.pack_into, memory, place)
        self._write_numbers = partial(behind.pack_into, memory, place + addresses.size)
        arguments = (ctypes.c_void_p * 1)(first)
        self._memory = (memory, arguments)
        self._function = _cu_function()(kernel.function)
        self._shape = (*grid, 1, kernel.spec.threads, 1, 1, kernel.spec.shared_bytes)
        self._overlaps = overlaps
        self._use(current_stream(device))

    def launch(self, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """Launch on torch's current stream of the plan's device. ``pointers`` are those of the
        maps, then the block's own. Without ``numbers``, those of the last call stay: pass them
        always, or never, when they are 0."""
        if current_device() == self.device:
            self.start(current_stream(self.device), pointers, numbers)
        else:
            with torch.cuda.device(self.device):
                self.start(current_stream(self.device), pointers, numbers)
        if events.listening():
            self.report()

    def start(self, stream: int, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """:meth:`launch` on a stream of the plan's device, which must be current; listeners to
        events do not hear of it."""
        if self._maps is not None:
            pointers = self._maps.encode(pointers)
        self._write(*pointers)
        if numbers is not None:
            self._write_numbers(*numbers)
        if stream != self._stream:
            self._use(stream)
        status = self._launch()[0]
        if status != 0:
            raise RuntimeError(f"launch of {self.kernel.spec.description} failed: {status.name}")

    def repeat(self) -> None:
        """Launch with what the last call was given, on torch's current stream of the plan's device,
        which must be current; listeners to events do not hear of it."""
        stream = current_stream(self.device)
        if stream != self._stream:
            self._use(stream)
        status = self._launch()[0]
        if status != 0:
            raise RuntimeError(f"launch of {self.kernel.spec.description} failed: {status.name}")

    def _use(self, stream: int) -> None:
        """Make what launches on a stream: kept, as most calls are on that of the last one. A launch
        by a config takes 0.37 us, by its nine numbers 0.43 to 0.5."""
        config = _config(self._shape, stream, self._overlaps)
        block = ctypes.addressof(self._memory[1])
        self._launch = partial(_cu_launch_kernel_ex(), config, self._function, block, 0)
        self._stream = stream

    def report(self) -> None:
        """Tell listeners to events of a launch."""
        kernel, spec = self.kernel, self.kernel.spec
        grid = f"{self.grid[0]}x{self.grid[1]}"
        events.emit(
            "launch", kernel.key, kernel.arch, spec.description, grid=grid, block=spec.threads
        )


def start_all(
    steps: tuple, device: int, addresses: list[int], numbers: list | tuple | None = None
) -> None:
    """Launch plans one behind the other on torch's current stream of their device, which must be
    current. ``steps`` are plans, each with what picks its pointers from ``addresses``, and whether
    it takes ``numbers``, if there are some."""
    stream = current_stream(device)
    for plan, pick, numbered in steps:
        plan.start(stream, pick(addresses), numbers if numbered else None)
    if events.listening():
        for plan, _, _ in steps:
            plan.report()


class _Maps:
    """The encoded tensor maps at the head of a block. Results are often written to two places in
    turn, one while the other is still in use, so maps are kept by address: a copy of one takes
    0.1 us, encoding it 1 us and more."""

    __slots__ = ("_block", "_encoders", "_held", "_known", "_places")

    def __init__(self, maps: tuple[TensorMap, ...], memory: ctypes.Array, start: int):
        from kernlib.runtime.tensor_map import Encoder  # which kernels without maps do not load

        self._block = memoryview(memory).cast("B")
        starts = [start + MAP_BYTES * index for index in range(len(maps))]
        first = ctypes.addressof(memory)
        self._encoders = [Encoder(m, first + at) for m, at in zip(maps, starts, strict=True)]
        self._places = [slice(at, at + MAP_BYTES) for at in starts]
        self._held: tuple = ()  # the addresses of the maps in the block
        self._known: list[dict[int, bytes]] = [{} for _ in maps]

    def encode(self, pointers: tuple[int, ...]) -> tuple[int, ...]:
        """Put the maps of the first pointers in place, and answer the other pointers."""
        count = len(self._encoders)
        addresses = pointers[:count]
        if addresses != self._held:
            held, self._held = self._held, ()  # should one be refused
            for index, address in enumerate(addresses):
                if not held or address != held[index]:
                    self._put(index, address)
            self._held = addresses
        return pointers[count:]

    def _put(self, index: int, address: int) -> None:
        known, place = self._known[index], self._places[index]
        found = known.get(address)
        if found is not None:
            self._block[place] = found
            return
        self._encoders[index](address)
        if len(known) >= KNOWN_MAPS:
            known.clear()
        known[address] = bytes(self._block[place])


def _config(shape: tuple[int, ...], stream: int, overlaps: bool) -> object:
    """The CUlaunchConfig of a grid, a block and dynamic shared memory on a stream. It owns the
    memory of its attributes: what is assigned to them is copied."""
    from cuda.bindings import driver

    made = driver.CUlaunchConfig()
    made.gridDimX, made.gridDimY, made.gridDimZ = shape[:3]
    made.blockDimX, made.blockDimY, made.blockDimZ = shape[3:6]
    made.sharedMemBytes = shape[6]
    made.hStream = driver.CUstream(stream)
    if overlaps and _driver_version() >= OVERLAPS_FROM:
        kinds = driver.CUlaunchAttributeID
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        made.attrs, made.numAttrs = [attribute], 1
    return made


@lru_cache(maxsize=1)
def _driver_version() -> int:
    """The CUDA that the driver is for: 12030 for 12.3."""
    from cuda.bindings import driver

    return int(driver.cuDriverGetVersion()[1])


@lru_cache(maxsize=1)
def _cu_launch_kernel_ex() -> Callable:
    from cuda.bindings.driver import cuLaunchKernelEx

    return cuLaunchKernelEx


@lru_cache(maxsize=1)
def _cu_function() -> type:
    """An int in place of the function's object costs each launch 0.1 us."""
    from cuda.bindings.driver import CUfunction

    return CUfunction


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
