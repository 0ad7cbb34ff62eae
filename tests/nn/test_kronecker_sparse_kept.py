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
    made, stored = layer(CHAIN, algo).requires_grad_(False), noted_storage(monkeypatch)
    made = made.freeze() if promised else made.freeze().thaw()
    x = inputs(made, 3)
    with torch.no_grad():
        made(x)
        kept = [*stored]
        made(x)
    assert len(kept) == len(CHAIN) and None not in kept
    assert all(map(operator.is_, stored, (*kept, *kept)))


COUNTED = {
    "in place": lambda made: made.factors[0].mul_(2),
    "a slice": lambda made: made.factors[0][0].zero_(),
    "data": lambda made: setattr(made.factors[0], "data", 3 * made.factors[0].data),
    "data twice": lambda made: [
        setattr(made.factors[0], "data", k * made.factors[0].detach().clone()) for k in (2, 3)
    ],
    "parameter": lambda made: made.factors.__setitem__(
        0, torch.nn.Parameter(made.factors[0].detach() + 1)
    ),
    "loaded": lambda made: made.load_state_dict(layer(CHAIN, seed=5).state_dict()),
    "assigned": lambda made: made.load_state_dict(layer(CHAIN, seed=5).state_dict(), assign=True),
    "reset": lambda made: made.reset_parameters(),
    "dtype and back": lambda made: made.float().double(),
}


def by_dlpack(made):
    torch.from_dlpack(made.factors[0].detach()).mul_(2)


def by_a_fused_step(made):
    made.factors[0].grad = torch.ones_like(made.factors[0])
    torch.optim.SGD([made.factors[0]], lr=0.1, fused=True).step()
    made.zero_grad()


def by_memory_of_another(made):
    """Kept values must not be views of what the weight no longer is."""
    old = made.factors[0].data
    made.factors[0].data = old.clone()
    made(inputs(made, 3))
    old.zero_()
    made.factors[0].data.mul_(2)


UNCOUNTED = {  # by torch
    "data in place": lambda made: made.factors[0].data.mul_(2),
    "numpy": lambda made: made.factors[0].detach().numpy().fill(2.0),
    "storage": lambda made: made.factors[0].untyped_storage().fill_(0),
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
    made = layer(CHAIN, algo).requires_grad_(trains)
    x = inputs(made, 3)
    with torch.no_grad():
        before = made(x)
        CHANGES[change](made)
        found = made(x)
    torch.testing.assert_close(found, expected(made, x))
    assert change == "dtype and back" or not torch.allclose(found, before)


@pytest.mark.parametrize("change", COUNTED)
@pytest.mark.parametrize("algo", DERIVING)
def test_a_counted_write_shows_under_the_promise_too(algo, change):
    made = layer(CHAIN, algo).requires_grad_(False).freeze()
    x = inputs(made, 3)
    with torch.no_grad():
        made(x)
        COUNTED[change](made)
        torch.testing.assert_close(made(x), expected(made, x))


def train(made):
    """A step that torch does not count, after which nothing is left of it."""
    for parameter in made.parameters():
        parameter.requires_grad_(True)
    made(inputs(made, 3)).square().sum().backward()
    torch.optim.SGD(made.parameters(), lr=0.1, fused=True).step()
    made.zero_grad()
    for parameter in made.parameters():
        parameter.requires_grad_(False)


def replay(made):
    """What the replay of a graph that trains leaves: its gradients, and steps nobody counts."""
    by_a_fused_step(made)
    made.factors[0].grad = torch.ones_like(made.factors[0])


def train_compiled(made):
    made.train()
    by_a_fused_step(made)
    made.eval()


def train_by_hand(made):
    made.requires_grad_(True)
    by_a_fused_step(made)
    made.requires_grad_(False)


@pytest.mark.few(8)
@pytest.mark.parametrize("promised", [True, False])
@pytest.mark.parametrize("phase", [train, replay, train_compiled, train_by_hand])
@pytest.mark.parametrize("algo", DERIVING)
def test_training_between_two_frozen_calls_shows(algo, phase, promised):
    made = layer(CHAIN, algo).requires_grad_(False)
    made = made.freeze() if promised else made
    x = inputs(made, 3)
    before = made(x)
    phase(made)
    torch.testing.assert_close(made(x), expected(made, x))
    assert not torch.allclose(made(x), before)


@pytest.mark.parametrize("promised", [False, True])
@each_algo
def test_another_place_in_the_same_memory_shows(algo, promised):
    made = layer(CHAIN, algo).requires_grad_(False)
    made = made.freeze() if promised else made
    x = inputs(made, 3)
    both = random(2, *CHAIN[0])
    with torch.no_grad():
        for weight in both:
            made.factors[0].data = weight
            torch.testing.assert_close(made(x), expected(made, x))


@pytest.mark.parametrize("fused", (False, True))  # which counts no version
@each_algo
def test_an_optimizer_step_shows(algo, fused):
    made = layer(CHAIN, algo)
    x = inputs(made, 3)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, fused=fused)
    for _ in range(2):
        made(x).square().sum().backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(made(x), expected(made, x))


@pytest.mark.parametrize("algo", DERIVING)
def test_nothing_is_kept_of_weights_that_train(algo, monkeypatch):
    made, stored = layer(CHAIN, algo), noted_storage(monkeypatch)
    made.freeze()
    made(inputs(made, 3)).sum().backward()
    with torch.no_grad():
        made(inputs(made, 3))
    assert stored == [None] * 2 * len(CHAIN)


@pytest.mark.parametrize("algo", DERIVING)
def test_what_inference_mode_keeps_serves_gradients_of_the_input(algo):
    made = layer(CHAIN, algo).requires_grad_(False).freeze()
    x = inputs(made, 3, requires_grad=True)
    with torch.inference_mode():
        made(x)
    made(x).sum().backward()
    torch.testing.assert_close(x.grad, product(made).sum(0).expand_as(x))


@pytest.mark.parametrize("algo", DERIVING)
def test_tensors_of_inference_mode_count_no_versions(algo):
    with torch.inference_mode():
        made = layer(CHAIN, algo).freeze()
        x = inputs(made, 3)
        made(x)
        made.factors[0].mul_(2)
        torch.testing.assert_close(made(x), expected(made, x))


@each_algo
def test_inputs_of_inference_mode_train_it(algo):
    made = layer([(2, 3, 4, 1)], algo)
    with torch.inference_mode():
        x = inputs(made, 3)
    made(x).sum().backward()
    torch.testing.assert_close(made.bias.grad, torch.full_like(made.bias, 3.0))


def test_another_algorithm_lets_go_of_what_was_kept(monkeypatch):
    made, stored = layer(CHAIN, "dense").requires_grad_(False), noted_storage(monkeypatch)
    with torch.no_grad():
        made(inputs(made, 3))
    kept = [weakref.ref(t) for t in stored]
    stored.clear()
    gc.collect()
    assert len(kept) == len(CHAIN) and all(ref() is not None for ref in kept)
    made.algo = "bmm"
    gc.collect()
    assert all(ref() is None for ref in kept)
