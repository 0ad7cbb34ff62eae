"""Bad calls of every public function. ``KERNLIB_CONTRACT_CASES`` sets how many (2000), and
``KERNLIB_CONTRACT_SEED`` another seed (0)."""

from __future__ import annotations

import os

import pytest

from contract import cases, families

COUNT = int(os.environ.get("KERNLIB_CONTRACT_CASES", "2000"))
SEED = int(os.environ.get("KERNLIB_CONTRACT_SEED", "0"))


@pytest.mark.parametrize("name", families.ENTRIES)
def test_a_call_is_refused_in_words_or_right(name, nothing_compiles):
    faults = families.faults(name, SEED, families.share(name, COUNT))
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])


def test_every_public_function_has_an_entry():
    assert families.public() == {*families.ENTRIES} | families.WITHOUT_ARGUMENTS


def test_a_fault_is_one(nothing_compiles):
    """The judge: what is torch's own, names nothing, or is wrong does not pass."""
    import torch

    def run(call, wanted=None):
        entry = cases.Entry(call, lambda c: {"a": c.randn(2, 2)}, 1, wanted=wanted)
        return [cases.run(entry, "f", 0, index).fault for index in range(40)]

    assert all(run(lambda a: torch.ops.aten.mm(a)))
    assert any(run(lambda a: a.nosuch))
    assert any(run(lambda a: a + 1, lambda a: a))
    assert not any(run(lambda a: 0))
