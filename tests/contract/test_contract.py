"""Bad calls of every public function. ``KERNLIB_CONTRACT_CASES`` sets how many (2000), and
``KERNLIB_CONTRACT_SEED`` another seed (0)."""

from __future__ import annotations

import os

import pytest

from tests.contract import cases, families, of_cli

COUNT = int(os.environ.get("KERNLIB_CONTRACT_CASES", "2000"))
SEED = int(os.environ.get("KERNLIB_CONTRACT_SEED", "0"))


@pytest.mark.parametrize("name", families.ENTRIES)
def test_a_call_is_refused_in_words_or_right(name, nothing_compiles):
    faults = families.faults(name, SEED, families.share(name, COUNT))
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])


def test_a_command_line_ends_in_words(nothing_compiles, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    lines = (of_cli.line(SEED, index) for index in range(max(1, COUNT // 10)))
    faults = [fault for fault in map(of_cli.fault, lines) if fault]
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])


def test_every_public_function_has_an_entry():
    assert families.public() - families.covered() == set()


def test_a_fault_is_one(nothing_compiles):
    """The judge: what is torch's own, names nothing, or is wrong does not pass."""
    import torch

    def run(call, wanted=None):
        entry = cases.Entry(call, lambda c: {"a": c.randn(2, 2)}, 1, wanted=wanted)
        return [cases.run(entry, "f", 0, index).fault for index in range(40)]

    assert sum(map(bool, run(lambda a: torch.ops.aten.mm(a)))) > 25
    assert any(run(lambda a: a.nosuch))
    assert any(run(lambda a: a + 1, lambda a: a))
    assert not any(run(lambda a: 0))
