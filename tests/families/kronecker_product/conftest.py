"""GPUs whose Kronecker products the host computes."""

import pytest

from tests.families.kronecker_product import emulated
from tests.support import fakes
from tests.support.emulation.emulator import kernels_of


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    fakes.forget()
    yield emulated.install(monkeypatch, kernels_of(tmp_path_factory))
    fakes.forget()
