"""Derivatives where a formula has two sides that are equal: what they are is said here and by the
formulas, and torch, whose own choice for ``clamp`` has changed, decides nothing."""

import pytest
import torch

import kernlib as kl
from kernlib import sparse
from kernlib.descriptors.derivative import Derivative
from kernlib.nn import KSLinear, SparseLinear
from kernlib.nn.kronecker_sparse import ALGOS
from kernlib.runtime import expressions
from tests.support.ties import ACTIVATIONS, BY_PARAMETER, CHOSEN

pytestmark = pytest.mark.few(1000)  # each expression has a tie of its own

DOUBLE = torch.float64


def of_rules(chain, by, values):
    made = Derivative("Identity", chain, by)
    own = {name: values[name] for name in made.parameters}
    return expressions.apply((made,), torch.zeros(1, dtype=DOUBLE), own).item()


@pytest.mark.parametrize("text", CHOSEN)
def test_an_expression_of_the_value(text):
    chain = (kl.Custom(text),)
    v = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    (found,) = torch.autograd.grad(expressions.apply(chain, v, {}).sum(), v)
    assert found.item() == of_rules(chain, "v", {}) == CHOSEN[text]


@pytest.mark.parametrize("number", [False, True])
@pytest.mark.parametrize("text", BY_PARAMETER)
def test_an_expression_of_a_parameter_is_the_same_for_numbers_and_tensors(text, number):
    chain = (kl.Custom(text, ("w",)),)
    v, w = (torch.zeros(1, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    value = expressions.apply(chain, v, {"w": 0.0 if number else w}).sum()
    by_v, by_w = BY_PARAMETER[text]
    assert torch.autograd.grad(value, v, retain_graph=True)[0].item() == by_v
    assert of_rules(chain, "v", {"w": 0.0}) == by_v
    if not number:
        assert torch.autograd.grad(value, w)[0].item() == by_w
    assert of_rules(chain, "w", {"w": 0.0}) == by_w


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_and_their_second_derivatives(activation, written):
    wanted = ACTIVATIONS[activation]
    if written:  # by its expression, where torch has a function
        activation = kl.Custom(activation.expression)
    v = torch.zeros(1, dtype=DOUBLE, requires_grad=True)
    (first,) = torch.autograd.grad(expressions.apply((activation,), v, {}), v, create_graph=True)
    (second,) = torch.autograd.grad(first, v) if first.requires_grad else (torch.zeros(()),)
    assert (first.item(), second.item()) == pytest.approx(wanted, abs=1e-12)
    assert of_rules((activation,), "v", {}) == pytest.approx(wanted[0], abs=1e-12)


VALUES = [-float("inf"), -1.0, -1e-45, -0.0, 0.0, 1e-45, 1e-40, 1.0, 3e38, float("inf")]


@pytest.mark.parametrize("operator", ["max", "min"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_tie_has_the_value_of_both(operator, share):
    known = torch.maximum if operator == "max" else torch.minimum
    for values in (VALUES, [*VALUES, float("nan")]):
        x, y = torch.tensor(values)[:, None], torch.tensor(values)
        found = expressions.extreme(operator, x, y, share)
        # Halves of equal numbers lose the last bit of a denormal.
        torch.testing.assert_close(found, known(x, y), rtol=0, atol=2e-45, equal_nan=True)
    for number in VALUES:
        wanted = known(y, torch.tensor(number))
        for pair in ((y, number), (number, y)):
            found = expressions.extreme(operator, *pair, share)
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-45, equal_nan=True)


# What trains from zero, in every family and by every way.


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("algo", ALGOS)
def test_ks_linear(algo, activation):
    layer = KSLinear([(2, 3, 4, 2)], bias=True, algo=algo, activation=activation, dtype=DOUBLE)
    for parameter in layer.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.arange(48.0, dtype=DOUBLE).reshape(3, 16)
    leaves = (layer.factors[0], layer.bias)
    to_weight, to_bias = torch.autograd.grad(layer(x).sum(), leaves)
    first, _ = ACTIVATIONS[activation]
    torch.testing.assert_close(to_bias, torch.full((12,), 3 * first, dtype=DOUBLE))
    wanted = first * x.sum(0).reshape(2, 1, 4, 2).expand(2, 3, 4, 2)
    torch.testing.assert_close(to_weight, wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_factor_and_a_chain(activation):
    first, _ = ACTIVATIONS[activation]
    weight = torch.zeros(1, 4, 4, 1, dtype=DOUBLE, requires_grad=True)
    x = torch.ones(2, 4, dtype=DOUBLE)
    last = kl.KroneckerSparse(1, 4, 4, 1, epilogue=activation)
    plain = kl.KroneckerSparse(1, 4, 4, 1)
    y = kl.run_kernel(last, x, weight)
    (found,) = torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(found, torch.full_like(found, 2 * first))
    eye = torch.eye(4, dtype=DOUBLE).reshape(1, 4, 4, 1)
    y = kl.run_kernel(kl.KroneckerSparseChain((plain, last)), x, eye, weight)
    (found,) = torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(found, torch.full_like(found, 2 * first))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_compressed_matrix(activation):
    first, _ = ACTIVATIONS[activation]
    x = torch.zeros(3, 8, requires_grad=True)
    matrix = sparse.compress(torch.eye(8))
    (found,) = torch.autograd.grad(sparse.matmul(matrix, x, epilogue=activation).sum(), x)
    torch.testing.assert_close(found, torch.full((3, 8), first))
    plain = torch.nn.Linear(8, 8)
    torch.nn.init.zeros_(plain.bias)
    with torch.no_grad():
        plain.weight.copy_(torch.eye(8))
    layer = SparseLinear.from_linear(plain, activation=activation)
    (found,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found, torch.full((3, 8), first))


@pytest.mark.parametrize("text", CHOSEN)
def test_a_kernel_matrix(text):
    kernel = kl.dot_product(epilogue=kl.Custom(text))
    a = torch.zeros(3, 2, dtype=DOUBLE, requires_grad=True)
    b = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=DOUBLE)
    (found,) = torch.autograd.grad(kl.run_kernel(kernel, a, b).sum(), a)
    torch.testing.assert_close(found, CHOSEN[text] * b.sum(0).expand(3, 2))


def test_the_largest_difference_in_equal_parts():
    a = torch.tensor([[1.0, -1.0, 0.5]], dtype=DOUBLE, requires_grad=True)
    found = kl.cdist(a, torch.zeros(1, 3, dtype=DOUBLE), p=float("inf"))
    (slope,) = torch.autograd.grad(found.sum(), a)
    assert slope.tolist() == [[0.5, -0.5, 0.0]]
