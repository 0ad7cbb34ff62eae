"""GPUs that exist only by name, for tests without one: tensors say that they are there, kernels
are compiled, loaded and launched without compiler and driver, and all of it is noted."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from kernlib.jit import service
from kernlib.jit.entry import Entry
from kernlib.runtime import devices, driver
from kernlib.runtime.plan import forget_plans

MODELS = {  # capability, name, multiprocessors
    0: ((9, 0), "GPU 0", 132),
    1: ((8, 6), "GPU 1", 84),
    2: ((7, 5), "GPU 2", 40),
}


class OnGpu(torch.Tensor):
    """A CPU tensor that calls itself one of GPU 0."""

    index = 0
    device = property(lambda self: torch.device(*_place(self)))

    def get_device(self) -> int:
        return -1 if self.is_meta else self.index


def _place(t: OnGpu) -> tuple:
    """Of a copy on meta, which torch makes one of the same class, it is that."""
    return ("meta",) if t.is_meta else ("cuda", t.index)


class OnSecondGpu(OnGpu):
    index = 1


def on_gpu(*shape: int, kind: type = OnGpu, **options) -> torch.Tensor:
    return torch.zeros(*shape, **options).as_subclass(kind)


class Torch:
    """torch, where new tensors of a GPU are in host memory, full of what nobody wrote."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, device=None, **options):
        made = torch.empty(*shape, **options).fill_(77)
        return made.as_subclass(OnGpu) if torch.device(device).type == "cuda" else made.to(device)

    def zeros(self, *shape, **options):
        return self.empty(*shape, **options).zero_()

    def arange(self, *ends, dtype, device):
        made = torch.arange(*ends, dtype=dtype)
        return self.empty(len(made), dtype=dtype, device=device).copy_(made)


def at(address, strides, sizes, dtype):
    """A view of memory by its address, as a kernel has it."""
    reach = sum(stride * (size - 1) for stride, size in zip(strides, sizes, strict=True)) + 1
    raw = (ctypes.c_char * (reach * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(sizes, strides)


class Gpus:
    """``builds``, ``loads`` and ``launches`` in order; ``entered``, the devices made current, the
    innermost last; ``clock``, in ms, which each launch moves by ``cost(launch)``."""

    def __init__(self) -> None:
        self.entered, self.builds, self.loads, self.launches = [0], [], [], []
        self.capturing, self.clock, self.cost = False, 0.0, lambda launch: 1.0
        self._kernels = {}

    @contextmanager
    def device(self, index: int):
        self.entered.append(index)
        try:
            yield
        finally:
            self.entered.pop()

    def build(self, spec, arch: str) -> Entry:
        thread = threading.current_thread()
        self.builds.append(SimpleNamespace(arch=arch, what=spec.description, thread=thread))
        return Entry("pairwise", b"", {"registers": "100", "shared_bytes": str(spec.shared_bytes)})

    def loaded(self, spec, device: int, arch: str):
        return self._kernels.get((device, spec.canonical(), arch))

    def kernel(self, spec, device: int, arch: str):
        assert not self.capturing and self.entered[-1] == device
        thread = threading.current_thread()
        self.loads.append(SimpleNamespace(device=device, what=spec.description, thread=thread))
        service.build(spec, arch)
        made = SimpleNamespace(spec=spec, key="0" * 64, arch=arch, function=len(self.loads))
        self._kernels[device, spec.canonical(), arch] = made
        return made

    def launch(self, config, function, *arguments) -> tuple:
        """Stands for cuLaunchKernelEx."""
        made = self.loads[int(function) - 1]
        assert not self.capturing and self.entered[-1] == made.device
        grid = config.gridDimX, config.gridDimY
        noted = SimpleNamespace(device=made.device, grid=grid, what=made.what)
        self.launches.append(noted)
        self.clock += self.cost(noted)
        return (0,)

    def event(self, enable_timing: bool):
        return _Event(self)


class _Event:
    def __init__(self, gpus: Gpus):
        self._gpus = gpus

    def record(self) -> None:
        self.time = self._gpus.clock

    def synchronize(self) -> None:
        assert self.time <= self._gpus.clock

    def elapsed_time(self, end: _Event) -> float:
        return end.time - self.time


def install(monkeypatch) -> Gpus:
    """Put the GPUs where torch, the service and the driver would be asked."""
    gpus = Gpus()
    faked = {
        "is_available": lambda: True,
        "current_device": lambda: gpus.entered[-1],
        "get_device_capability": lambda index: MODELS[index][0],
        "get_device_name": lambda index: MODELS[index][1],
        "get_device_properties": lambda index: SimpleNamespace(
            name=MODELS[index][1], multi_processor_count=MODELS[index][2]
        ),
        "device": gpus.device,
        "is_current_stream_capturing": lambda: gpus.capturing,
        "Event": gpus.event,
    }
    for name, fake in faked.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("build", "loaded", "kernel"):
        monkeypatch.setattr(service, name, getattr(gpus, name))
    monkeypatch.setattr(driver, "bind_context", lambda device: None)
    monkeypatch.setattr(driver, "launch_kernel_ex", lambda: gpus.launch)
    monkeypatch.setattr(driver, "version", lambda: driver.OVERLAPS_FROM)
    monkeypatch.setattr(devices, "current_device", lambda: gpus.entered[-1])
    monkeypatch.setattr(devices, "current_stream", lambda device: 0)
    return gpus


def forget() -> None:
    """No plan made, no model known."""
    forget_plans()
    devices.real_model.cache_clear()
