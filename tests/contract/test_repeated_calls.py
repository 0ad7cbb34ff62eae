"""The same call has the same bits, also under torch.use_deterministic_algorithms, on the CPU."""

from importlib import import_module

import pytest

from tests.architecture.package import FAMILIES
from tests.linalg import repeats as solvers
from tests.support import repeats

CALLS = {name: import_module(f"tests.families.{name}.repeats").calls for name in FAMILIES} | {
    "iterative": solvers.iterative,
    "direct": solvers.direct,
}


@pytest.mark.parametrize("calls", CALLS)
def test_the_same_call_has_the_same_bits(calls):
    repeats.same_bits(CALLS[calls], "cpu", rows=40)
