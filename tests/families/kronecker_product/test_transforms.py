"""Products with Kronecker products inside of transforms of torch.func, and forward mode."""

import itertools

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_product import operators
from tests.families.kronecker_product.cases import SHAPES, SIDES, operands, product, randn

SIDE = pytest.mark.parametrize("side", SIDES)


def close(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def expected(side, x, first, second):
    return product(x, (first, second), side)


@SIDE
@pytest.mark.parametrize("mapped", list(itertools.product((False, True), repeat=3))[1:], ids=str)
def test_vmap_is_the_batched_result(mapped, side, seed):
    x, factors = operands(SHAPES, 3, side)
    tensors = [randn(4, *t.shape) if on else t for t, on in zip((x, *factors), mapped, strict=True)]
    for place in (0, 1, -1):  # where the mapped dimension stands
        given = [t.movedim(0, place) if on else t for t, on in zip(tensors, mapped, strict=True)]
        dims = tuple(place if on else None for on in mapped)
        for alpha in (1.0, 3.0):

            def function(x, *factors, alpha=alpha):
                return kl.kron_matmul(x, factors, side=side, alpha=alpha)

            found = torch.vmap(function, in_dims=dims)(*given)
            close(found, alpha * expected(side, *tensors))
            made = kl.KroneckerProduct(SHAPES, side=side)
            found = torch.vmap(lambda *t, made=made: kl.run_kernel(made, *t), in_dims=dims)(*given)
            close(found, expected(side, *tensors))


@SIDE
def test_vmap_of_batches_and_of_vmap(side, seed):
    x, factors = operands(SHAPES, 3, side)
    batched = randn(5, 2, *x.shape), randn(5, 2, 1, 2, 3), randn(2, 4, 5)

    def function(x, first, second):
        return kl.kron_matmul(x, [first, second], side=side)

    found = torch.vmap(function, in_dims=(0, 0, None))(*batched)
    wanted = torch.stack([function(a, b, batched[2]) for a, b in zip(*batched[:2], strict=True)])
    close(found, wanted)
    nested = torch.vmap(torch.vmap(function, (0, None, None)), (None, 0, None))
    first = randn(4, 2, 3)
    wanted = product(batched[0][0], (first[:, None], factors[1]), side)
    close(nested(batched[0][0], first, factors[1]), wanted)


@pytest.mark.parametrize("name", ["x", "alpha", "beta", "y", "all"])
@SIDE
def test_vmap_over_each_argument(side, name, seed):
    x, factors = operands(SHAPES, 3, side)
    shape = product(x, factors, side).shape
    given = {"x": x, "alpha": randn(), "beta": randn(), "y": randn(*shape)}
    for each in given if name == "all" else (name,):
        given[each] = randn(4, *given[each].shape)
    dims = tuple(0 if name in (each, "all") else None for each in given)

    def function(x, alpha, beta, y):
        return kl.kron_matmul(x, factors, alpha=alpha, beta=beta, y=y, side=side)

    found = torch.vmap(function, in_dims=dims)(*given.values())
    wide = {k: v[:, None, None] if v.dim() == 1 else v for k, v in given.items()}
    wanted = wide["alpha"] * product(wide["x"], factors, side) + wide["beta"] * wide["y"]
    close(found, wanted)


@SIDE
def test_grad_and_jacobians(side, seed):
    x, factors = operands(((2, 3), (2, 2)), 3, side)
    tensors = (x, *factors)

    def function(x, *factors):
        return kl.kron_matmul(x, factors, alpha=2.0, side=side)

    for place in range(3):
        found = torch.func.grad(lambda *t: function(*t).square().sum(), argnums=place)(*tensors)
        wanted = torch.func.grad(lambda *t: (2 * expected(side, *t)).square().sum(), argnums=place)
        close(found, wanted(*tensors))
        backward = torch.func.jacrev(function, argnums=place)(*tensors)
        close(torch.func.jacfwd(function, argnums=place)(*tensors), backward)
    hessian = torch.func.hessian(lambda f: function(x, f, factors[1]).square().sum())(factors[0])
    wanted = torch.func.hessian(lambda f: (2 * expected(side, x, f, factors[1])).square().sum())
    close(hessian, wanted(factors[0]))


def test_gradients_of_each_row_and_of_numbers(seed):
    x, factors = operands(SHAPES, 5)

    def loss(alpha, factor, x):
        return kl.kron_matmul(x, [factor, factors[1]], alpha=alpha).square().sum()

    alpha = randn()
    each = torch.vmap(torch.func.grad(loss, (0, 1)), in_dims=(None, None, 0))(alpha, factors[0], x)
    leaves = alpha.clone().requires_grad_(), factors[0].clone().requires_grad_()
    loss(*leaves, x).backward()
    close([t.sum(0) for t in each], [t.grad for t in leaves])


@pytest.mark.parametrize("recording", [False, True])
@SIDE
def test_forward_mode_is_not_dropped(side, recording, seed):
    """Nor of the operator, as traced and compiled calls have it."""
    x, factors = operands(SHAPES, 5, side)
    forward = torch.autograd.forward_ad
    with forward.dual_level(), torch.set_grad_enabled(recording):
        for alpha in (1.0, 3.0):
            y = kl.kron_matmul(forward.make_dual(x, 2 * x), factors, side=side, alpha=alpha)
            close(forward.unpack_dual(y).tangent, 2 * alpha * product(x, factors, side))
        made = kl.KroneckerProduct(SHAPES, side=side)
        y = operators.run(made, forward.make_dual(x, 2 * x), *factors)
        close(forward.unpack_dual(y).tangent, 2 * product(x, factors, side))
    found = torch.func.jvp(
        lambda alpha: kl.kron_matmul(x, factors, alpha=alpha, side=side), (randn(),), (randn(),)
    )[1]
    assert found.shape == product(x, factors, side).shape


def test_batches_of_gradients(seed):
    x, factors = operands(SHAPES, 5, grad=True)
    y = kl.kron_matmul(x, factors)
    grads = randn(4, *y.shape)
    found = torch.autograd.grad(y, (x, *factors), grads, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, (x, *factors), g, retain_graph=True) for g in grads]
    close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))
