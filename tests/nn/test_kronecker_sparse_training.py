"""KSLinear trains: gradients of every algorithm, optimizers, autocast, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import kernlib as kl
from kernlib.nn import KSLinear
from kernlib.nn.kronecker_sparse_algorithms import STORAGE
from tests.nn.kronecker_sparse_cases import (
    ALGOS,
    CHAIN,
    LAYOUTS,
    error,
    expected,
    inputs,
    layer,
    noted_storage,
)

# Small, with b != c, gcd(b, c) = 1 and 2, a > 1 with d > 1.
PATTERNS = [[(2, 3, 2, 2)], [(1, 2, 4, 2), (2, 3, 2, 1)]]
each_algo = pytest.mark.parametrize("algo", ALGOS)
each_layout = pytest.mark.parametrize("bs_last", LAYOUTS, ids=["first", "last"])


def function_of(made: KSLinear):
    """The layer as a function of its input and parameters, and these."""
    names = [name for name, _ in made.named_parameters()]

    def call(x, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(made, given, (x,))

    return call, [p.detach().clone().requires_grad_() for p in made.parameters()]


@each_layout
@each_algo
@pytest.mark.parametrize("patterns", PATTERNS, ids=["factor", "chain"])
def test_gradcheck_and_gradgradcheck(patterns, algo, bs_last):
    made = layer(patterns, algo, bs_last, activation="tanh")
    call, parameters = function_of(made)
    arguments = (inputs(made, 2, requires_grad=True), *parameters)
    assert gradcheck(call, arguments, eps=1e-5, atol=1e-4)
    assert gradgradcheck(call, arguments, eps=1e-5, atol=1e-4, fast_mode=True)


@each_layout
@each_algo
def test_gradients_are_those_of_the_einsum_in_float64(algo, bs_last):
    exact = layer(CHAIN, "einsum", bs_last)
    found = layer(CHAIN, algo, bs_last, dtype=torch.float32)
    x = inputs(exact, 3, 4)
    gradients = []
    for made in (exact, found):
        given = x.to(made.factors[0].dtype, copy=True).requires_grad_()
        made(given).square().sum().backward()
        gradients.append([given.grad, *(p.grad for p in made.parameters())])
    for wanted, got in zip(*gradients, strict=True):
        assert got.shape == wanted.shape and error(got, wanted) < 1e-5


@each_algo
def test_gradients_of_empty_batches(algo):
    made = layer(CHAIN, algo)
    x = inputs(made, 0, requires_grad=True)
    made(x).sum().backward()
    assert x.grad.shape == x.shape
    assert all(not p.grad.any() for p in made.parameters())


def test_all_algorithms_train_to_the_same_parameters():
    trained = []
    for algo in ("auto", *ALGOS):
        made = layer(CHAIN, algo, activation="gelu")
        stepper = torch.optim.Adam(made.parameters(), lr=0.01)
        for step in range(3):
            stepper.zero_grad()
            made(inputs(made, 5, seed=step)).square().mean().backward()
            stepper.step()
        trained.append(made.state_dict())
    for state in trained[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, trained[0][name])


# Autocast.


@each_layout
@pytest.mark.parametrize("algo", ["auto", *ALGOS])
def test_autocast_is_that_of_nn_linear(algo, bs_last):
    made = layer(CHAIN, algo, bs_last, dtype=torch.float32)
    x = inputs(made, 6)
    twin = nn.Linear(made.in_features, made.out_features)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found = made(x)
            assert found.dtype == twin(x.T if bs_last else x).dtype == dtype
            assert made(x.to(dtype)).dtype == dtype
        assert error(found, expected(made, x)) < 2e-2
        found.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in made.parameters())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        kept = [made(x), made(x)]
    assert torch.equal(*kept) and error(kept[0], expected(made, x)) < 2e-2


@each_algo
def test_autocast_leaves_float64_alone(algo):
    made = layer(CHAIN, algo)
    x = inputs(made, 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = made(x)
    torch.testing.assert_close(found, expected(made, x))


# torch.compile.


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@each_algo
def test_compiled_with_its_gradients(algo, fresh_dynamo):
    made = layer(CHAIN[:2], algo, activation="gelu")
    run = torch.compile(made, backend="aot_eager", fullgraph=True)
    x = inputs(made, 3, requires_grad=True)
    wanted, found = made(x), run(x)
    torch.testing.assert_close(found, wanted)
    leaves = (x, *made.parameters())
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("algo", ["kernel", "einsum"])
def test_an_activation_of_ones_own_is_compiled(algo, fresh_dynamo):
    made = layer(CHAIN[:1], algo, activation=kl.Custom("max(v, 0) * exp(-v) + 1"))
    x = inputs(made, 3)
    found = torch.compile(made, backend="eager", fullgraph=True)(x)
    v = expected(made, x)
    torch.testing.assert_close(found, v.relu() * torch.exp(-v) + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("algo", ["auto", *ALGOS])
@pytest.mark.parametrize("trains", [False, True])
def test_compiled_calls_keep_nothing_and_see_new_weights(trains, algo, fresh_dynamo, monkeypatch):
    made = layer(CHAIN[:1], algo, bs_last=True).requires_grad_(trains).freeze()
    stored = noted_storage(monkeypatch)
    run = torch.compile(made, backend="eager", fullgraph=True, dynamic=True)
    for batch in (3, 5, 8):
        x = inputs(made, batch)
        with torch.no_grad():
            torch.testing.assert_close(run(x), expected(made, x))
            made.factors[0].mul_(2)
    assert bool(stored) == (algo in STORAGE) and set(stored) <= {None}


@pytest.mark.parametrize("algo", ["auto", "kernel", "bmm", "sparse"])
def test_exported(algo):
    made = layer(CHAIN[:2], algo)
    x = inputs(made, 3)
    program = torch.export.export(made, (x,), strict=False)
    torch.testing.assert_close(program.module()(x), made(x))
