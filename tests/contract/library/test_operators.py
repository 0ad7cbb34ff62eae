"""Operators are what torch asks of them, and eager calls do without."""

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

import kernlib as kl
from tests.architecture.package import FAMILIES
from tests.contract.library.operations import MODULES, each, every, recordings

pytestmark = pytest.mark.few(by="operation")


def test_every_family_has_cases():
    for family in FAMILIES:
        assert any(name.startswith(f"tests.families.{family}.") for name in MODULES), family


def leaf(value, recording: bool):
    """A tensor, or a list of them, of a test's own."""
    if isinstance(value, list):
        return [leaf(one, recording) for one in value]
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(recording)
    return value


@recordings(lambda one: one.checks)
def test_torchs_own_checks_of_operators_pass(operation, case, recording):
    kl.register_operators()
    name, arguments, places = operation.checks[case]
    given = [leaf(t, recording and place in places) for place, t in enumerate(arguments)]
    opcheck(getattr(torch.ops.kernlib, name).default, tuple(given))


@pytest.mark.filterwarnings("ignore:Input #")  # that they are not float64
@every(lambda one: one.numeric)
def test_gradients_of_operators_are_those_of_differences(operation, case):
    kl.register_operators()
    run, tensors, options, twice = operation.numeric[case]
    leaves = tuple(t.detach().requires_grad_() for t in tensors)
    assert torch.autograd.gradcheck(run, leaves, **dict(options))
    assert not twice or torch.autograd.gradgradcheck(run, leaves, **dict(options))


@pytest.mark.slow
@each()
def test_eager_calls_load_nothing_that_compiles(operation):
    code, absent = operation.quiet
    code = f"import sys, torch\nimport kernlib as kl\n{code}\n"
    code += f"print([name for name in {(*absent, 'torch._dynamo')} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr
