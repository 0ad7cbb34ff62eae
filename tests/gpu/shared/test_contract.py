"""Bad calls of every public function that takes tensors, and random writes of what layers hold, on
a GPU: refused in words, or right, and nothing that spoils the device's context.
``KERNLIB_CONTRACT_CASES`` sets how many (500)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.contract import families
from tests.nn import layer_writes

COUNT = int(os.environ.get("KERNLIB_CONTRACT_CASES", "500"))
SEED = int(os.environ.get("KERNLIB_CONTRACT_SEED", "0"))


@pytest.mark.parametrize("name", families.ON_GPU)
def test_a_call_is_refused_in_words_or_right(name, device):
    count = families.share(name, COUNT, families.ON_GPU)
    faults = families.faults(name, SEED, count, device)
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])
    torch.cuda.synchronize()
    assert torch.ones(3, device=device).sum() == 3


def test_writes_of_parameters_and_buffers_are_refused_in_words_or_right(device):
    """By torch's own utilities: fills, averages, casts, some of which torch does not count."""
    faults = layer_writes.faults(COUNT, str(device))
    assert not faults, "\n".join(faults)
    torch.cuda.synchronize()
    assert torch.ones(3, device=device).sum() == 3
