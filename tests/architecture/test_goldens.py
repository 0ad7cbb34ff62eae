"""What calls come to, as it was: specifications of kernels, launches, operators. A change that
moves code changes none of it; one that means to writes the file anew:

    python -m tests.architecture.test_goldens
"""

from __future__ import annotations

import json
from difflib import unified_diff
from itertools import chain
from pathlib import Path

import pytest
import torch

import kernlib as kl
from tests.architecture import (
    golden_blocks,
    golden_cases,
    golden_gradients,
    golden_kronecker,
    golden_launches,
)
from tests.support import fakes

GOLDEN = Path(__file__).resolve().parent / "goldens.json"
KEYS = (
    "CompositeExplicitAutograd", "CompositeImplicitAutograd", "Autograd", "Meta",
    "FuncTorchBatched", "CPU", "CUDA",
)  # fmt: skip
ANEW = "python -m tests.architecture.test_goldens"


def specs() -> dict:
    """Of each case how many specifications there are, their digest, and that without includes."""
    every = chain(golden_cases.cases(), golden_blocks.specs(), golden_kronecker.specs())
    return {name: list(golden_cases.digests(call())) for name, call in every}


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


def runs(monkeypatch) -> dict:
    """Of each call its launches, with the numbers that it passes."""
    fakes.forget()
    kl.register_operators()
    runs, lines = golden_gradients.install(monkeypatch), {}
    families = golden_launches.rare_calls, golden_blocks.launches, golden_kronecker.launches
    calls = [item for family in families for item in family().items()]
    for name, call in calls:
        runs.clear()
        fakes.forget()
        call()
        lines[name] = list(runs)
    fakes.forget()
    return lines


def gradients(monkeypatch) -> dict:
    """Operators and launches of calls whose gradient is recorded, of their backward passes, and of
    calls by operators."""
    kl.register_operators()
    runs, lines = golden_gradients.install(monkeypatch), {}
    groups = golden_gradients.cases(), golden_gradients.on_second_gpu()
    for index, cases in enumerate(groups):
        golden_gradients.everywhere(monkeypatch, index)
        lines |= {name: golden_gradients.passes(case, runs) for name, case in cases.items()}
    fakes.forget()
    return lines


def tuning(monkeypatch) -> dict:
    """Of calls the bytes under which a choice is kept, digested, and what may be kept."""
    golden_launches.install(monkeypatch)
    return golden_launches.tuned()


def operators() -> list[str]:
    """Names and schemas of what programs that were exported may name."""
    kl.register_operators()
    schemas = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in schemas if schema.name.startswith("kernlib::"))


def dispatch() -> dict:
    """Of each operator the keys that it has a kernel for, and its tags."""
    has, keys = torch._C._dispatch_has_kernel_for_dispatch_key, {}
    for schema in operators():
        name = schema.partition("(")[0]
        tags = getattr(torch.ops.kernlib, name.partition("::")[2]).default.tags
        keys[name] = [*(key for key in KEYS if has(name, key)), *map(str, tags)]
    return keys


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


@pytest.fixture(autouse=True)
def one_thread():
    """What torch computes is little: where others are at work too, its threads wait for each other
    ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def differing(found: dict, wanted: dict) -> str:
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    lines = []
    for name in names[:20]:
        pair = [[*map(str, made.get(name, ()))] for made in (wanted, found)]
        changes = [line for line in unified_diff(*pair, n=0, lineterm="") if line[0] != "@"]
        lines += [f"{name}:", *changes[2:]]
    return "\n".join([*lines, f"{len(names)} differ; if they are meant to: {ANEW}"])


def test_specifications_are_as_they_were(golden):
    found = specs()
    assert found == golden["specs"], differing(found, golden["specs"])


def test_launches_are_as_they_were(golden, monkeypatch):
    found = launches(monkeypatch)
    assert found == golden["launches"], differing(found, golden["launches"])


def test_runs_are_as_they_were(golden, monkeypatch):
    found = runs(monkeypatch)
    assert found == golden["runs"], differing(found, golden["runs"])


def test_gradients_and_recorded_calls_run_as_they_did(golden, monkeypatch):
    found = gradients(monkeypatch)
    assert found == golden["gradients"], differing(found, golden["gradients"])


def test_operators_are_as_they_were(golden):
    assert operators() == golden["operators"]
    found = dispatch()
    assert found == golden["dispatch"], differing(found, golden["dispatch"])


def test_every_operator_is_called(golden):
    lines = {line for made in golden["gradients"].values() for line in made}
    names = {schema.partition("(")[0].replace("::", ".") for schema in golden["operators"]}
    # Codecs of matrices are tested with their formats, chains with what compiles them, and formulas
    # by themselves.
    names -= {"kernlib.sparse_to_dense", "kernlib.kronecker_sparse_chain"}
    assert {name for name in names if not name.startswith("kernlib.formula")} <= lines


def test_choices_are_kept_as_they_were(golden, monkeypatch):
    """Else what was tuned is passed over, without a word."""
    found = tuning(monkeypatch)
    assert found == golden["tuning"], differing(found, golden["tuning"])


def main() -> None:
    made = {"specs": specs(), "operators": operators(), "dispatch": dispatch()}
    for find in (launches, runs, gradients, tuning):
        with pytest.MonkeyPatch.context() as monkeypatch:
            made[find.__name__] = find(monkeypatch)
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
