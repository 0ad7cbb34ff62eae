"""Loading for a device: the device's own arch, and nothing at all while a graph is captured."""

from contextlib import nullcontext

import pytest
import torch

import kernlib as kl
from kernlib import settings
from kernlib.errors import CaptureError, UnsupportedError
from kernlib.jit import compiler, service
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import devices, driver

SPEC = KernelSpec("test", '#include "common/math.cuh"\n', "entry", 32, description="my kernel")
CAPABILITIES = {0: (9, 0), 1: (8, 6), 2: (12, 0), 3: (7, 5)}


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Four GPUs that exist only by name; whoever asks a driver for more fails the test."""
    capturing = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: CAPABILITIES[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(service, "load", forbidden("a load"))
    monkeypatch.setattr(compiler, "compile_spec", forbidden("a compile"))
    monkeypatch.setattr(driver, "bind_context", lambda device: None)
    service.forget()
    yield capturing
    service.forget()


def forbidden(what):
    def refuse(*_):
        pytest.fail(f"{what} was begun")

    return refuse


@pytest.fixture
def loads(monkeypatch):
    """Loads and compiles that succeed, noted."""
    found = []

    def load(built, asked, device):
        found.append((device, asked.arch))
        return service.Kernel(asked.spec, asked.key.hex(), asked.arch, 1)

    monkeypatch.setattr(service, "load", load)
    monkeypatch.setattr(service, "build", lambda spec, arch: (spec, arch))
    return found


def test_a_miss_during_a_capture_names_prepare_and_touches_nothing(gpus):
    gpus.append(True)
    with pytest.raises(CaptureError, match=r"my kernel .*cuda:1.*kernlib\.prepare") as caught:
        devices.load(SPEC, 1)
    assert isinstance(caught.value, kl.KernlibError)


def test_a_loaded_kernel_is_found_during_a_capture(gpus, loads):
    before = devices.load(SPEC, 0)
    gpus.append(True)
    assert devices.load(SPEC, 0) is before
    with pytest.raises(CaptureError):
        devices.load(SPEC, 2)
    assert loads == [(0, "sm_90a")]


def test_the_capture_is_looked_for_on_the_tensors_device(gpus, monkeypatch):
    entered = []

    class Device(nullcontext):
        def __init__(self, index):
            super().__init__()
            entered.append(index)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: entered == [2])
    with pytest.raises(CaptureError, match="cuda:2"):
        devices.load(SPEC, 2)


def test_each_device_has_its_own_arch(loads):
    found = [devices.load(SPEC, index) for index in (1, 0, 2, 1)]
    assert [kernel.arch for kernel in found] == ["sm_86", "sm_90a", "sm_120", "sm_86"]
    assert loads == [(1, "sm_86"), (0, "sm_90a"), (2, "sm_120")]
    assert len({kernel.key for kernel in found}) == 3


ARCHS = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_103",
    (10, 7): "sm_107",
    (12, 0): "sm_120",
    (12, 1): "sm_121",
}


@pytest.mark.parametrize("capability", ARCHS)
def test_only_90_takes_an_a_target_and_portable_kernels_the_plain_one(capability, monkeypatch):
    monkeypatch.setitem(CAPABILITIES, 0, capability)
    assert devices.arch_of(0) == ARCHS[capability]
    with settings.override(portable=True):
        assert devices.arch_of(0) == ARCHS[capability].rstrip("a")


def test_a_device_below_the_floor_is_named(gpus):
    with pytest.raises(UnsupportedError, match=r"GPU 3 has compute capability 7\.5.*8\.0"):
        devices.load(SPEC, 3)


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(UnsupportedError, match="ROCm"):
        devices.arch_of(0)
