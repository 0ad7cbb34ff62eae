"""GPUs that exist by name alone, and kernels of attention on them."""

import pytest

from kernlib.families.blocksparse.attention import plans
from kernlib.runtime import devices, tensor_map
from tests.families.blocksparse.attention.on_host import Kernels
from tests.support import fakes


@pytest.fixture
def gpus(monkeypatch):
    fakes.forget()
    monkeypatch.setattr(devices, "raw_empty", None)
    # Nothing reads what maps hold.
    monkeypatch.setattr(tensor_map.Encoder, "__init__", lambda self, *_: None)
    monkeypatch.setattr(tensor_map.Encoder, "__call__", lambda self, address: None)
    for module in (devices, plans):
        monkeypatch.setattr(module, "torch", fakes.Torch())
    yield fakes.install(monkeypatch)
    fakes.forget()


@pytest.fixture
def kernels(gpus, monkeypatch):
    return Kernels(monkeypatch, gpus)
