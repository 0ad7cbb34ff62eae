"""GPUs that exist by name alone, and kernels of attention on them."""

import pytest

from kernlib.families.blocksparse.attention import plans
from kernlib.runtime import devices
from tests.families.blocksparse.attention.on_host import Kernels
from tests.support import fakes


@pytest.fixture
def gpus(monkeypatch):
    fakes.forget()
    monkeypatch.setattr(devices, "raw_empty", None)
    for module in (devices, plans):
        monkeypatch.setattr(module, "torch", fakes.Torch())
    yield fakes.install(monkeypatch)
    fakes.forget()


@pytest.fixture
def kernels(gpus, monkeypatch):
    return Kernels(monkeypatch, gpus)
