"""Threads of the host, which run the text of kernels."""

import pytest

from tests.support.emulation.emulator import Emulator, kernels_of


@pytest.fixture(scope="module")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(kernels_of(tmp_path_factory))
