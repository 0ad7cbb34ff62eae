"""Bad calls of every public function. ``KERNLIB_CONTRACT_CASES`` sets how many (2000), and
``KERNLIB_CONTRACT_SEED`` another seed (0)."""

from __future__ import annotations

import os

import pytest

from tests.contract import families, of_cli

pytestmark = pytest.mark.few(1000)  # each public function is a promise

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
