"""Chains of factors whose gradient is recorded as one step: on plain CPU tensors taken for those of
a GPU that exists only by name and whose kernels compute on the host."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import reference
from kernlib.runtime.plan import forget_plans
from tests.families.kronecker_sparse import fake_kernels
from tests.support import fakes

PATTERNS = (2, 3, 5, 4), (1, 4, 6, 4), (2, 3, 4, 2)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    yield fake_kernels.install_for_cpu(monkeypatch)
    fakes.forget()


def values(*shape):
    return torch.randint(-4, 5, shape).float() / 4


def chain(count: int, epilogue=(), **options) -> kl.KroneckerSparseChain:
    ends = [()] * (count - 1) + [epilogue]
    return kl.KroneckerSparseChain(
        tuple(
            kl.KroneckerSparse(*pattern, epilogue=end, **options)
            for pattern, end in zip(PATTERNS, ends, strict=False)
        )
    )


def expected(descriptor, x, *weights, **parameters):
    for factor, weight in zip(descriptor.factors, weights, strict=True):
        own = {name: parameters[name] for name in factor.parameters}
        x = reference.kronecker_sparse(factor, x, weight, own)
    return x


def gradients(run, descriptor, tensors, needs, parameters):
    leaves = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    named = {name: t.clone().requires_grad_() for name, t in parameters.items()}
    inputs = [*(t for t in leaves if t.requires_grad), *named.values()]
    y = run(descriptor, *leaves, **named)
    first = torch.autograd.grad(y.square().sum(), inputs, retain_graph=True)
    recorded = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
    twice = torch.autograd.grad(
        sum(t.square().sum() for t in recorded), inputs, allow_unused=True, materialize_grads=True
    )
    return y, *first, *recorded, *twice


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize(
    "needs", [(1, 1, 1, 1), (0, 0, 1, 0), (1, 0, 0, 0), (1, 0, 1, 1), (0, 1, 0, 1)]
)
def test_a_route_has_the_gradients_of_the_factors(needs, batch_last):
    descriptor = chain(3, (kl.Bias(), kl.Gelu()), batch_last=batch_last)
    x = values(40, 2, 3) if batch_last else values(2, 3, 40)
    tensors = [x, *(values(*pattern) for pattern in PATTERNS)]
    parameters = {"bias": values(12)}
    request = descriptor, tensors, [bool(need) for need in needs], parameters
    theirs = gradients(expected, *request)
    for _ in range(3):  # without a route, and by it
        for mine, reference_of in zip(gradients(kl.run_kernel, *request), theirs, strict=True):
            assert (mine - reference_of).norm() <= 1e-5 * reference_of.norm()


def test_a_chain_is_one_step_of_autograd():
    descriptor, x = chain(2), values(5, 40).requires_grad_()
    leaves = [x, *(values(*pattern).requires_grad_() for pattern in PATTERNS[:2])]
    grads = []
    for _ in range(3):
        y = kl.run_kernel(descriptor, *leaves)
        assert torch.equal(y, expected(descriptor, *leaves))
        grads.append(torch.autograd.grad(y.sum(), leaves))
    assert [step.variable is leaf for (step, _), leaf in zip(
        [pair for pair in y.grad_fn.next_functions if pair[0]], leaves, strict=True
    )] == [True] * 3  # fmt: skip
    y = kl.run_kernel(descriptor, *leaves)
    forget_plans()  # what a backward pass launches is found again
    grads.append(torch.autograd.grad(y.sum(), leaves))
    for again in grads[1:]:
        assert all(map(torch.equal, again, grads[0]))


def test_what_is_wrong_is_said_of_known_chains_too():
    descriptor, x = chain(2, kl.Bias()), values(5, 40).requires_grad_()
    weights, bias = [values(*pattern) for pattern in PATTERNS[:2]], values(16)
    for _ in range(2):
        kl.run_kernel(descriptor, x, *weights, bias=bias)
    for parameters, error, message in (
        ({}, ValueError, "needs bias"),
        ({"bias": bias, "gain": 1}, TypeError, "gain is no argument"),
        ({"bias": bias[1:]}, ValueError, "bias must have shape"),
        ({"bias": 1.0}, TypeError, "bias must be a dense tensor"),
    ):
        with pytest.raises(error, match=message):
            kl.run_kernel(descriptor, x, *weights, **parameters)
    with pytest.raises(TypeError, match="weight"):
        kl.run_kernel(descriptor, x, weights[0], bias=bias)
    with pytest.raises(RuntimeError, match="out takes no result whose gradient"):
        kl.run_kernel(descriptor, x, *weights, bias=bias, out=torch.empty(5, 16))
