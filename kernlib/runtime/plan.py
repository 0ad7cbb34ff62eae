"""Plans: the prepared call of one kernel for one signature of tensors.

A plan holds what does not change between calls: function, grid, block and the by-value parameter
struct, of which a call rewrites the head (pointers and numbers). A launch with one such struct
takes 4.9 us, where one with 25 separate arguments takes 11.3.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernlib import events
from kernlib.jit import service
from kernlib.lowering.parameters import MAP_ALIGNMENT, MAP_BYTES
from kernlib.runtime import devices, driver

if TYPE_CHECKING:
    from kernlib.lowering.tma import TensorMap

PLANS = 1024  # most plans of a thread; then the oldest goes, which takes 0.1 ms to make again


class Plan:
    """One kernel, its grid and its parameter block, for the thread that made it.

    The block starts with an encoded tensor map for each of ``maps``, then ``pointers`` addresses,
    then numbers in the struct format ``numbers``, then ``fixed`` bytes. A launch rewrites maps and
    addresses, and the numbers where it is given some.

    A plan that ``overlaps`` may begin before the previous launch on its stream has ended: its
    kernel waits for that by ``griddepcontrol.wait``, and the previous kernel permits it.
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
        total = MAP_BYTES * len(maps) + size + len(fixed)
        # The block begins at the first address in this memory that the maps may have.
        memory = ctypes.create_string_buffer(total + MAP_ALIGNMENT)
        start = -ctypes.addressof(memory) % MAP_ALIGNMENT
        first = ctypes.addressof(memory) + start
        place = start + MAP_BYTES * len(maps)
        memory[place + size : place + size + len(fixed)] = fixed
        self._maps = _encoded(maps, memory, start) if maps else None
        self._write = partial(addresses.pack_into, memory, place)
        self._write_numbers = partial(behind.pack_into, memory, place + addresses.size)
        arguments = (ctypes.c_void_p * 1)(first)
        self._memory = (memory, arguments)
        self._function = driver.function_type()(kernel.function)
        self._shape = (*grid, 1, kernel.spec.threads, 1, 1, kernel.spec.shared_bytes)
        self._overlaps = overlaps
        self._use(devices.current_stream(device))

    def launch(self, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """Launch on torch's current stream of the plan's device. ``pointers`` are the addresses of
        the maps' tensors, then the block's own. Without ``numbers``, those of the last call stay.
        So pass them at each call or at none: then they are 0. Raises RuntimeError if the launch
        fails."""
        if devices.current_device() == self.device:
            self.start(devices.current_stream(self.device), pointers, numbers)
        else:
            with torch.cuda.device(self.device):
                self.start(devices.current_stream(self.device), pointers, numbers)
        if events.watched:
            self.report()

    def start(self, stream: int, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """:meth:`launch` on a given stream of the plan's device, which must be current. It emits no
        event."""
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
        """Launch again with what the last call was given, on torch's current stream of the plan's
        device, which must be current. It emits no event."""
        stream = devices.current_stream(self.device)
        if stream != self._stream:
            self._use(stream)
        status = self._launch()[0]
        if status != 0:
            raise RuntimeError(f"launch of {self.kernel.spec.description} failed: {status.name}")

    def _use(self, stream: int) -> None:
        """Make the function that launches on a stream. It is kept, since most calls are on the
        stream of the call before. A launch by a config takes 0.37 us, by its nine numbers 0.43 to
        0.5."""
        config = driver.launch_config(self._shape, stream, self._overlaps)
        block = ctypes.addressof(self._memory[1])
        launch = partial(driver.launch_kernel_ex(), config, self._function, block, 0)
        self._launch = driver.ranged(launch, self.kernel.spec.description)
        self._stream = stream

    def report(self) -> None:
        """Emit the event of a launch."""
        kernel, spec = self.kernel, self.kernel.spec
        grid = f"{self.grid[0]}x{self.grid[1]}"
        events.emit(
            "launch", kernel.key, kernel.arch, spec.description, grid=grid, block=spec.threads
        )


def start_all(
    steps: tuple, device: int, addresses: list[int], numbers: list | tuple | None = None
) -> None:
    """Launch plans one after another on torch's current stream of their device, which must be
    current. ``steps`` are plans, each with the function that picks its pointers from ``addresses``,
    and with whether it takes ``numbers``."""
    stream = devices.current_stream(device)
    for plan, pick, numbered in steps:
        plan.start(stream, pick(addresses), numbers if numbered else None)
    if events.watched:
        for plan, _, _ in steps:
            plan.report()


def _encoded(maps: tuple[TensorMap, ...], memory: ctypes.Array, start: int) -> object:
    from kernlib.runtime.tensor_map import Maps  # kernels without maps do not load it

    return Maps(maps, memory, start)


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

    def find(self, key: tuple | None) -> Any:
        """The plan of a key, or None: of a key that cannot be hashed too, as the checks say which
        argument is wrong."""
        try:
            return self.plans.get(key)
        except TypeError:
            return None

    def keep(self, key: tuple, plan: object) -> None:
        """Keep a plan under a key. The oldest plan goes where there are PLANS already."""
        if len(self.plans) >= PLANS:
            for oldest in list(self.plans)[:1]:  # none, if another thread has just dropped all
                self.plans.pop(oldest, None)
        self.plans[key] = plan


def forget_plans() -> None:
    """Drop the plans of all threads: their next calls choose their kernels anew. A call that is
    making its plan meanwhile may keep it."""
    for reference in _tables.valuerefs():
        table = reference()
        if table is not None:
            table.plans.clear()
