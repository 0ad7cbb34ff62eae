"""What calls come to, as it was: specifications of kernels, launches, operators. A change that
moves code changes none of it; one that means to writes the file anew:

    python -m tests.architecture.test_goldens
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kernlib as kl
from tests.architecture import golden_cases, golden_launches
from tests.support import fakes

GOLDEN = Path(__file__).resolve().parent / "goldens.json"
ANEW = "python -m tests.architecture.test_goldens"


def specs() -> dict:
    """Of each case how many specifications there are, their digest, and that without includes."""
    return {name: list(golden_cases.digests(call())) for name, call in golden_cases.cases()}


def launches(monkeypatch) -> dict:
    """Of each call the plans that it makes."""
    fakes.forget()
    found, made = golden_launches.install(monkeypatch), {}
    for name, call in golden_launches.calls().items():
        found.clear()
        fakes.forget()
        call()
        made[name] = list(found)
    fakes.forget()
    return made


def tuning(monkeypatch) -> dict:
    """Of calls the bytes under which a choice is kept, digested, and what may be kept."""
    golden_launches.install(monkeypatch)
    return golden_launches.tuned()


def operators() -> list[str]:
    """Names and schemas of what programs that were exported may name."""
    kl.register_operators()
    known = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in known if schema.name.startswith("kernlib::"))


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


def differing(found: dict, wanted: dict) -> str:
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    lines = [f"{name}: {wanted.get(name)} is now {found.get(name)}" for name in names[:20]]
    return "\n".join([*lines, f"{len(names)} differ; if they are meant to: {ANEW}"])


def test_specifications_are_as_they_were(golden):
    found = specs()
    assert found == golden["specs"], differing(found, golden["specs"])


def test_launches_are_as_they_were(golden, monkeypatch):
    found = launches(monkeypatch)
    assert found == golden["launches"], differing(found, golden["launches"])


def test_operators_are_as_they_were(golden):
    assert operators() == golden["operators"]


def test_choices_are_kept_as_they_were(golden, monkeypatch):
    """Else what was tuned is passed over, without a word."""
    found = tuning(monkeypatch)
    assert found == golden["tuning"], differing(found, golden["tuning"])


def main() -> None:
    made = {"specs": specs(), "operators": operators()}
    for name, find in (("launches", launches), ("tuning", tuning)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            made[name] = find(monkeypatch)
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
