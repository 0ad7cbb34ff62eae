"""Bad calls of every public function that takes tensors, on a GPU: refused in words, or right, and
nothing that spoils the device's context. ``KERNLIB_CONTRACT_CASES`` sets how many (500)."""

from __future__ import annotations

import os

import pytest
import torch

from tests.contract import families

COUNT = int(os.environ.get("KERNLIB_CONTRACT_CASES", "500"))
SEED = int(os.environ.get("KERNLIB_CONTRACT_SEED", "0"))


@pytest.mark.parametrize("name", families.ON_GPU)
def test_a_call_is_refused_in_words_or_right(name, device):
    count = families.share(name, COUNT, families.ON_GPU)
    faults = families.faults(name, SEED, count, device)
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])
    torch.cuda.synchronize()
    assert torch.ones(3, device=device).sum() == 3
