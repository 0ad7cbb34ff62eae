"""What KSLinear keeps of frozen factors between calls, and which writes to them it sees."""

from __future__ import annotations

import gc
import operator
import weakref

import pytest
import torch

from kernlib.nn.kronecker_sparse_algorithms import STORAGE
from tests.nn.kronecker_sparse_cases import (
    ALGOS,
    CHAIN,
    expected,
    inputs,
    layer,
    noted_storage,
    product,
    random,
)

DERIVING = tuple(STORAGE)
each_algo = pytest.mark.parametrize("algo", ALGOS)


@pytest.mark.parametrize(
    "algo, promised", [*((a, True) for a in DERIVING), *((a, False) for a in DERIVING[1:])]
)
def test_storage_is_kept_while_a_frozen_weight_is_what_it_was(algo, promised, monkeypatch):
    module, stored = layer(CHAIN, algo).requires_grad_(False), noted_storage(monkeypatch)
    module = module.freeze() if promised else module.freeze().thaw()
    x = inputs(module, 3)
    with torch.no_grad():
        module(x)
        kept = [*stored]
        module(x)
    assert len(kept) == len(CHAIN) and None not in kept
    assert all(map(operator.is_, stored, (*kept, *kept)))


COUNTED = {
    "in place": lambda module: module.factors[0].mul_(2),
    "a slice": lambda module: module.factors[0][0].zero_(),
    "data": lambda module: setattr(module.factors[0], "data", 3 * module.factors[0].data),
    "data twice": lambda module: [
        setattr(module.factors[0], "data", k * module.factors[0].detach().clone()) for k in (2, 3)
    ],
    "parameter": lambda module: module.factors.__setitem__(
        0, torch.nn.Parameter(module.factors[0].detach() + 1)
    ),
    "loaded": lambda module: module.load_state_dict(layer(CHAIN, seed=5).state_dict()),
    "assigned": lambda module: module.load_state_dict(
        layer(CHAIN, seed=5).state_dict(), assign=True
    ),
    "reset": lambda module: module.reset_parameters(),
    "dtype and back": lambda module: module.float().double(),
}


def by_dlpack(module):
    torch.from_dlpack(module.factors[0].detach()).mul_(2)


def by_a_fused_step(module):
    module.factors[0].grad = torch.ones_like(module.factors[0])
    torch.optim.SGD([module.factors[0]], lr=0.1, fused=True).step()
    module.zero_grad()


def by_memory_of_another(module):
    """Kept values must not be views of what the weight no longer is."""
    old = module.factors[0].data
    module.factors[0].data = old.clone()
    module(inputs(module, 3))
    old.zero_()
    module.factors[0].data.mul_(2)


UNCOUNTED = {  # by torch
    "data in place": lambda module: module.factors[0].data.mul_(2),
    "numpy": lambda module: module.factors[0].detach().numpy().fill(2.0),
    "storage": lambda module: module.factors[0].untyped_storage().fill_(0),
    "dlpack": by_dlpack,
    "fused step": by_a_fused_step,
    "memory of another": by_memory_of_another,
}
CHANGES = COUNTED | UNCOUNTED


@pytest.mark.few(by="change")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("algo", sorted(ALGOS, key=lambda algo: algo not in DERIVING[1:]))
@pytest.mark.parametrize("trains", (False, True))  # nothing is stored of those that train
def test_a_changed_weight_shows(algo, change, trains):
    module = layer(CHAIN, algo).requires_grad_(trains)
    x = inputs(module, 3)
    with torch.no_grad():
        before = module(x)
        CHANGES[change](module)
        result = module(x)
    torch.testing.assert_close(result, expected(module, x))
    assert change == "dtype and back" or not torch.allclose(result, before)


@pytest.mark.parametrize("change", COUNTED)
@pytest.mark.parametrize("algo", DERIVING)
def test_a_counted_write_shows_under_the_promise_too(algo, change):
    module = layer(CHAIN, algo).requires_grad_(False).freeze()
    x = inputs(module, 3)
    with torch.no_grad():
        module(x)
        COUNTED[change](module)
        torch.testing.assert_close(module(x), expected(module, x))


def train(module):
    """A step that torch does not count, after which nothing is left of it."""
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    module(inputs(module, 3)).square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1, fused=True).step()
    module.zero_grad()
    for parameter in module.parameters():
        parameter.requires_grad_(False)


def replay(module):
    """What the replay of a graph that trains leaves: its gradients, and steps nobody counts."""
    by_a_fused_step(module)
    module.factors[0].grad = torch.ones_like(module.factors[0])


def train_compiled(module):
    module.train()
    by_a_fused_step(module)
    module.eval()


def train_by_hand(module):
    module.requires_grad_(True)
    by_a_fused_step(module)
    module.requires_grad_(False)


@pytest.mark.few(8)
@pytest.mark.parametrize("promised", [True, False])
@pytest.mark.parametrize("phase", [train, replay, train_compiled, train_by_hand])
@pytest.mark.parametrize("algo", DERIVING)
def test_training_between_two_frozen_calls_shows(algo, phase, promised):
    module = layer(CHAIN, algo).requires_grad_(False)
    module = module.freeze() if promised else module
    x = inputs(module, 3)
    before = module(x)
    phase(module)
    torch.testing.assert_close(module(x), expected(module, x))
    assert not torch.allclose(module(x), before)


@pytest.mark.parametrize("promised", [False, True])
@each_algo
def test_another_place_in_the_same_memory_shows(algo, promised):
    module = layer(CHAIN, algo).requires_grad_(False)
    module = module.freeze() if promised else module
    x = inputs(module, 3)
    both = random(2, *CHAIN[0])
    with torch.no_grad():
        for weight in both:
            module.factors[0].data = weight
            torch.testing.assert_close(module(x), expected(module, x))


@pytest.mark.parametrize("fused", (False, True))  # which counts no version
@each_algo
def test_an_optimizer_step_shows(algo, fused):
    module = layer(CHAIN, algo)
    x = inputs(module, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        module(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(module(x), expected(module, x))


@pytest.mark.parametrize("algo", DERIVING)
def test_nothing_is_kept_of_weights_that_train(algo, monkeypatch):
    module, stored = layer(CHAIN, algo), noted_storage(monkeypatch)
    module.freeze()
    module(inputs(module, 3)).sum().backward()
    with torch.no_grad():
        module(inputs(module, 3))
    assert stored == [None] * 2 * len(CHAIN)


@pytest.mark.parametrize("algo", DERIVING)
def test_what_inference_mode_keeps_serves_gradients_of_the_input(algo):
    module = layer(CHAIN, algo).requires_grad_(False).freeze()
    x = inputs(module, 3, requires_grad=True)
    with torch.inference_mode():
        module(x)
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, product(module).sum(0).expand_as(x))


@pytest.mark.parametrize("algo", DERIVING)
def test_tensors_of_inference_mode_count_no_versions(algo):
    with torch.inference_mode():
        module = layer(CHAIN, algo).freeze()
        x = inputs(module, 3)
        module(x)
        module.factors[0].mul_(2)
        torch.testing.assert_close(module(x), expected(module, x))


@each_algo
def test_inputs_of_inference_mode_train_it(algo):
    module = layer([(2, 3, 4, 1)], algo)
    with torch.inference_mode():
        x = inputs(module, 3)
    module(x).sum().backward()
    torch.testing.assert_close(module.bias.grad, torch.full_like(module.bias, 3.0))


def test_another_algorithm_lets_go_of_what_was_kept(monkeypatch):
    module, stored = layer(CHAIN, "dense").requires_grad_(False), noted_storage(monkeypatch)
    with torch.no_grad():
        module(inputs(module, 3))
    kept = [weakref.ref(t) for t in stored]
    stored.clear()
    gc.collect()
    assert len(kept) == len(CHAIN) and all(ref() is not None for ref in kept)
    module.algo = "bmm"
    gc.collect()
    assert all(ref() is None for ref in kept)
