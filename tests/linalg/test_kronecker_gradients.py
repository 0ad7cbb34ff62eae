"""Derivatives of what is computed of Kronecker products, first and second, and what they keep."""

import math

import pytest
import torch

from kernlib.linalg.kronecker import (
    kron_cholesky,
    kron_eigh,
    kron_inverse,
    kron_logdet,
    kron_solve,
)
from tests.linalg.cases import positive
from tests.linalg.kronecker_cases import (
    WIDE,
    check_derivatives,
    close,
    dense_solution,
    kron,
    shifted,
    spd,
    square,
    with_gradient,
)

SMALL = ((1, 2), ((2,), ()))


def symmetric(factors):
    """As those must be whose lower triangle alone is read, when one element is changed."""
    return [(f + f.mT) / 2 for f in factors]


def test_derivatives_of_factorisations(seed):
    factors = spd(SMALL)
    check_derivatives(lambda *f: tuple(kron_cholesky(symmetric(f))), *factors)
    check_derivatives(lambda *f: tuple(kron_inverse(f)), *square(SMALL))


def test_derivatives_of_eigenvalues_and_eigenvectors(seed):
    """Squares of eigenvectors have no sign."""

    def values(*factors):
        found = kron_eigh(symmetric(factors))
        return found.eigenvalues(), *(v.square() for v in found.vectors)

    apart = [torch.diag_embed(torch.arange(1.0, 1 + f.shape[-1], dtype=WIDE)) for f in spd(SMALL)]
    check_derivatives(values, *(f + torch.randn_like(f) / 8 for f in apart))


@pytest.mark.parametrize("cholesky", [False, True])
def test_derivatives_without_noise(cholesky, seed):
    factors, b = spd(SMALL) if cholesky else square(SMALL), torch.randn(2, 1, dtype=WIDE)
    read = symmetric if cholesky else list
    check_derivatives(lambda b, *f: kron_solve(read(f), b, cholesky=cholesky), b, *factors)
    check_derivatives(lambda *f: kron_logdet(f), *factors)


def repeated(case):
    """Multiples of the identity, but for the last."""
    *same, last = spd(case)
    return [torch.eye(f.shape[-1], dtype=WIDE).expand(f.shape) * 1.5 for f in same] + [last]


DERIVED = (
    (((3,), ((),)), ()),
    (((2, 2), ((2,), ())), (2,)),
    pytest.param(((2, 1, 3), ((), (2, 1), (1,))), (2, 1), marks=pytest.mark.slow),
)


@pytest.mark.parametrize("make", [spd, repeated])
@pytest.mark.parametrize(("case", "shape"), DERIVED)
def test_derivatives_with_noise(make, case, shape, seed):
    """First and second, also where eigenvalues are equal."""
    factors, noise = make(case), torch.rand(shape, dtype=WIDE) + 0.5
    b = torch.randn(math.prod(case[0]), dtype=WIDE)
    check_derivatives(lambda b, s, *f: kron_solve(symmetric(f), b, noise=s), b, noise, *factors)
    check_derivatives(lambda s, *f: kron_logdet(symmetric(f), noise=s), noise, *factors)


def test_gradients_are_those_of_the_dense_matrix(seed):
    case = ((4, 1, 7), ((2,), (3, 1), ()))
    factors = spd(case)
    factors[2] = torch.eye(7, dtype=WIDE)
    inputs = with_gradient(torch.rand(3, 2, dtype=WIDE), torch.randn(28, dtype=WIDE), *factors)
    noise, b, *own = inputs
    found = (kron_solve(own, b, noise=noise) * b).sum(-1) + kron_logdet(own, noise=noise)
    matrix = shifted(kron([(f + f.mT) / 2 for f in own]), noise)
    wanted = (dense_solution(matrix, b) * b).sum(-1) + torch.logdet(matrix)
    close(found, wanted)
    weight = torch.randn_like(found)
    pairs = [torch.autograd.grad(each, inputs, weight) for each in (found, wanted)]
    for one, other in zip(*pairs, strict=True):
        close(one, other, 1e-8)


def test_identities_have_finite_gradients_in_float32(seed):
    factors = with_gradient(torch.eye(5), torch.eye(4))
    b = torch.randn(20)
    loss = kron_solve(factors, b, noise=0.1).sum() + kron_logdet(factors, noise=0.1)
    grads = torch.autograd.grad(loss, factors, create_graph=True)
    second = torch.autograd.grad(sum((g * torch.randn_like(g)).sum() for g in grads), factors)
    assert all(g.isfinite().all() for g in (*grads, *second))


def test_only_what_is_asked_for_has_a_gradient(seed):
    first, second = spd(((2, 3), ((2,), ())))
    b = torch.randn(6, dtype=WIDE)
    for given in ({"b": b}, {"first": first}, {"second": second}):
        (leaf,) = with_gradient(*given.values())
        named = {"b": b, "first": first, "second": second} | dict.fromkeys(given, leaf)
        factors = [named["first"], named["second"]]
        x = kron_solve(factors, named["b"], noise=0.5)
        (found,) = torch.autograd.grad(x.sum(), leaf)
        assert found.shape == leaf.shape and found.isfinite().all()


def test_no_product_of_eigenvalues_is_kept(seed):
    """Of tensors with an element for each row autograd keeps the solution alone."""
    kept = []
    factors, b = with_gradient(*spd(((5, 7), ((), ())))), torch.randn(35, 2, dtype=WIDE)

    def keep(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kron_solve(factors, b, noise=0.5)
        assert [shape for shape in kept if shape.numel() >= 50] == [b.shape]
        kept.clear()
        kron_logdet(factors, noise=0.5)
        assert not [shape for shape in kept if shape.numel() >= 50]


def test_third_derivatives_of_the_determinant_with_noise_are_refused(seed):
    (f,) = with_gradient(positive(3, 3, dtype=WIDE))
    (first,) = torch.autograd.grad(kron_logdet([f], noise=0.5), f, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), f, create_graph=True)
    assert second.isfinite().all()
    with pytest.raises(RuntimeError, match="kron_logdet with noise has no third derivatives"):
        torch.autograd.grad(second.sum(), f)


def test_autocast_changes_nothing(seed):
    factors = with_gradient(*spd(((2, 3), ((2,), ())), torch.float32))
    b = torch.randn(6, 2)

    def call(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            x = kron_solve(factors, b, noise=0.5)
            loss = x.sum() + kron_logdet(factors, noise=0.5).sum()
            return x, *torch.autograd.grad(loss, factors)

    pairs = zip(call(True), call(False), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("call", [
    lambda f, b: [kron_solve(f, b)],
    lambda f, b: [kron_solve(f, b, cholesky=True)],
    lambda f, b: kron_inverse(f),
    lambda f, b: kron_cholesky(f),
    lambda f, b: [kron_logdet(f)],
])  # fmt: skip
def test_factors_and_gradients_are_as_exact_inside_of_autocast(call, seed):
    factors, b = with_gradient(*spd(((2, 3), ((2,), ())), torch.float32)), torch.randn(6, 2)

    def derived(factors, b):
        results = call(factors, b)
        loss = sum((x.exp() * torch.arange(1, 1 + x.numel()).view(x.shape)).sum() for x in results)
        first = torch.autograd.grad(loss, factors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), factors)
        return *results, *first, *second

    with torch.autocast("cpu", torch.bfloat16):
        ours = derived(factors, b)
    wanted = derived(with_gradient(*(f.double() for f in factors)), b.double())
    for one, other in zip(ours, wanted, strict=True):
        assert one.dtype is torch.float32
        assert (one - other).norm() <= 1e-6 * other.norm()
