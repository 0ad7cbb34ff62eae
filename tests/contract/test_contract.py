"""Bad calls of every public function and method, chosen from a seed: each is refused by a line of
kernlib that names the argument, what it was and what would do, or is right. A fast run has 300 of
them and ``--cases many`` 2000; ``KERNLIB_CONTRACT_CASES`` sets another number, and
``KERNLIB_CONTRACT_SEED`` another seed (0)."""

from __future__ import annotations

import os

import pytest

from tests.contract import families, of_cli
from tests.support import selection

pytestmark = pytest.mark.few(1000)  # each public function is a promise

FEW, MANY = 300, 2000
SEED = int(os.environ.get("KERNLIB_CONTRACT_SEED", "0"))


@pytest.fixture
def count(request) -> int:
    """How many calls all functions share."""
    is_fast = selection.cases_of(request.config) == "few"
    return int(os.environ.get("KERNLIB_CONTRACT_CASES", FEW if is_fast else MANY))


@pytest.mark.parametrize("name", families.ENTRIES)
def test_a_call_is_refused_in_words_or_right(name, count, nothing_compiles):
    faults = families.faults(name, SEED, families.share(name, count))
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])


def test_a_command_line_ends_in_words(count, nothing_compiles, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    lines = (of_cli.line(SEED, index) for index in range(max(1, count // 10)))
    faults = [fault for fault in map(of_cli.fault, lines) if fault]
    assert not faults, "\n".join([f"KERNLIB_CONTRACT_SEED={SEED}", *faults])


def test_every_public_function_has_an_entry():
    assert families.public() - families.covered() == set()


def test_every_public_method_has_an_entry():
    assert families.methods() - families.covered_methods() == set()
