"""GPUs that exist only by name, for reductions whose kernels threads of the host run."""

import pytest

from kernlib.families.pairwise.reductions import operation
from tests.support import fakes
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    fakes.forget()
    yield emulated.install(monkeypatch, kernels_of(tmp_path_factory), operation)
    fakes.forget()
