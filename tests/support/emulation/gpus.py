"""GPUs that exist only by name, whose kernels are run on the host by their text: from a call to the
last store."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

import torch

from kernlib.runtime import devices, driver
from tests.support import fakes
from tests.support.emulation import maps
from tests.support.emulation.emulator import Emulator
from tests.support.fakes import OnGpu, Torch


def install(monkeypatch, folder: Path, *modules: ModuleType) -> fakes.Gpus:
    """Put the GPUs in place, of which ``modules`` ask torch; ``specs`` of the result are those
    that were launched."""
    made, emulator = fakes.install(monkeypatch), Emulator(folder)
    made.specs, known, kernel = [], {}, made.kernel

    def loaded(spec, device, arch):
        found = kernel(spec, device, arch)
        known[found.function] = spec
        return found

    def launched(config, function, arguments, extra):
        answer = made.launch(config, function, arguments, extra)
        spec = known[int(function)]
        made.specs.append(spec)
        block = ctypes.c_void_p.from_address(arguments).value
        emulator.launch(spec, (config.gridDimX, config.gridDimY), block)
        return answer

    monkeypatch.setattr(devices.service, "kernel", loaded)
    monkeypatch.setattr(driver, "launch_kernel_ex", lambda: launched)
    monkeypatch.setattr(driver, "encode_tiled", lambda: maps.encode)
    monkeypatch.setattr(devices, "raw_empty", None)
    for module in (*modules, devices):
        monkeypatch.setattr(module, "torch", Torch())
    return made


def gpu(t):
    """A tensor, or those of a list, on GPU 0, with their strides; anything else as it is."""
    if isinstance(t, list):
        return [gpu(each) for each in t]
    return t.detach().as_subclass(OnGpu) if isinstance(t, torch.Tensor) else t


def host(t: torch.Tensor) -> torch.Tensor:
    """A tensor of a GPU as what it is."""
    return t.as_subclass(torch.Tensor)
