"""Where the tests of lowered attention run."""

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention import hopper
from kernlib.runtime.devices import arch_of


@pytest.fixture
def on_gpu():
    """Tensors are made on the GPU."""
    with torch.device("cuda"):
        yield


@pytest.fixture
def on_wgmma(on_gpu):
    """On a GPU that has it."""
    if arch_of(torch.cuda.current_device()) != hopper.ARCH:
        pytest.skip(f"needs {hopper.ARCH}")
