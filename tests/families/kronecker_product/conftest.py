"""GPUs whose Kronecker products the host computes."""

import pytest

from kernlib.families.kronecker_product.lowering import grouping
from tests.families.kronecker_product import emulated
from tests.support import fakes
from tests.support.emulation.emulator import kernels_of


@pytest.fixture(autouse=True)
def no_groups():
    """Of another test, which may have had kernels that take less."""
    clear = grouping.groups.cache_clear
    clear()
    yield
    clear()


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    fakes.forget()
    yield emulated.install(monkeypatch, kernels_of(tmp_path_factory))
    fakes.forget()
