"""What torch's settings around a call change on a CPU: nothing, but for those that are followed,
of which the families' own tests are. docs/concepts/accuracy.md has the table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

import kernlib as kl
from tests.contract.test_repeated_calls import CALLS
from tests.support import repeats
from tests.support.defaults import SURROUNDINGS
from tests.support.torch_settings import CASES, OF_TORCH_ALONE, torch_permits


@contextmanager
def all_of(*settings: Callable):
    with ExitStack() as stack:
        for entered in settings:
            stack.enter_context(entered())
        yield


@contextmanager
def memory_as_it_was():
    """Where torch is deterministic it fills new memory, so that reads of it show, unless told."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with repeats.deterministic():
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


# Together, as none of them changes anything.
ON_GPUS = partial(torch_permits, "products" if "products" in CASES else "default")
SETTINGS = {
    "float64, and of torch alone": partial(
        all_of, SURROUNDINGS["float64"], *OF_TORCH_ALONE.values()
    ),
    "float16, a device, and of GPUs": partial(
        all_of, SURROUNDINGS["float16"], SURROUNDINGS["a default device"], ON_GPUS
    ),
    "a device, and memory": partial(all_of, SURROUNDINGS["a device"], memory_as_it_was),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("calls", CALLS)
def test_settings_that_are_not_of_a_call_change_none_of_its_bits(calls):
    """Torch's defaults of dtype and device, and what it may round, or sum, in calls of its own."""
    repeats.unchanged(CALLS[calls], "cpu", 12, SETTINGS)


@pytest.mark.few(100)
@pytest.mark.parametrize("calls", ["pairwise", "iterative", "direct", "of sums"])
def test_autocast_changes_no_bits_of_pairwise_calls_and_solvers(calls):
    """Nor second derivatives that are taken inside of it."""
    every = CALLS | {"of sums": second_derivatives_of_sums}
    repeats.unchanged(every[calls], "cpu", 12, {"autocast": SURROUNDINGS["autocast"]})


def second_derivatives_of_sums(make: repeats.Maker):
    sides = make(12, 19, recorded=True), make(21, 19, recorded=True), make(21, 3, recorded=True)
    for made, numbers in (
        (kl.gaussian(), {"bandwidth": 3.0}),
        (kl.polynomial(2), {"gamma": 0.1, "offset": 1.0}),
        (kl.laplace_l1(), {"bandwidth": 9.0}),
    ):
        call = partial(kl.kernel_matmul, made, **numbers)
        yield made.text, partial(repeats.slopes, call, sides, True)
    yield "dot", partial(repeats.slopes, partial(kl.run_kernel, kl.dot_product()), sides[:2], True)
