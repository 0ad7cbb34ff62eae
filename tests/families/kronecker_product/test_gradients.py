"""Gradients of products with Kronecker products on CPU tensors, to the second order."""

from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import kernlib as kl
from tests.families.kronecker_product.cases import (
    MANY,
    SHAPES,
    SIDES,
    layouts,
    operands,
    product,
    randn,
)
from tests.support.speeds import slow_but

SIDE = pytest.mark.parametrize("side", SIDES)
CHECKED = [SHAPES, ((1, 1),), ((1, 3), (2, 2)), ((3, 1), (1, 2)), ((2, 1), (2, 3), (1, 2))]
leaf = partial(randn, grad=True)


def whole(side, y, alpha, beta, x, *factors):
    return kl.kron_matmul(x, factors, alpha=alpha, beta=beta, y=y, side=side)


def expected(side, y, alpha, beta, x, *factors):
    return alpha * product(x, factors, side) + beta * y


def check(function, tensors) -> None:
    options = {"eps": 1e-5, "atol": 1e-4}
    assert gradcheck(function, tensors, **options)
    assert gradgradcheck(function, tensors, **options)


@SIDE
@pytest.mark.parametrize("shapes", slow_but((SHAPES,), CHECKED), ids=str)
def test_first_and_second_gradients_are_right(shapes, side, seed):
    x, factors = operands(shapes, 2, side, grad=True)
    check(partial(whole, side), (leaf(1), leaf(), leaf(), x, *factors))


BATCHES = [((2,), (), ()), ((), (2,), ()), ((2, 1), (2,), (1,)), ((), (2, 1), (3,))]


@SIDE
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_gradients_of_batches(batches, side, seed):
    x = leaf(*batches[0], *((2, 4) if side == "right" else (6, 2)))
    factors = leaf(*batches[1], 2, 3), leaf(*batches[2], 2, 2)
    batch = torch.broadcast_shapes(*batches)
    y = leaf(*batch[1:], *((1, 6) if side == "right" else (4, 1)))
    tensors = (y, leaf(), leaf(), x, *factors)
    found, wanted = whole(side, *tensors), expected(side, *tensors)
    assert found.shape[:-2] == batch
    close_gradients(found, wanted, tensors)
    assert gradcheck(partial(whole, side), tensors)


def close_gradients(found, wanted, tensors) -> None:
    grad = torch.randn_like(found)
    ours, theirs = (
        torch.autograd.grad(t, tensors, grad, retain_graph=True) for t in (found, wanted)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@SIDE
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("name", MANY)
def test_gradients_are_those_of_the_whole_matrix(name, rows, side, seed):
    x, factors = operands(MANY[name], rows, side, grad=True)
    tensors = (leaf(1, 1), leaf(), leaf(), x, *factors)
    close_gradients(whole(side, *tensors), expected(side, *tensors), tensors)


@SIDE
def test_gradients_of_a_vector_and_of_transposed_factors(side, seed):
    x, factors = operands(SHAPES, 1, side, grad=True)
    x = x.detach().reshape(-1).requires_grad_()
    line = x[None] if side == "right" else x[:, None]
    found = kl.kron_matmul(x, factors, side=side)
    close_gradients(found, product(line, factors, side).reshape(-1), (x, *factors))
    turned = [f.detach().mT.contiguous().requires_grad_() for f in factors]
    made = kl.KroneckerProduct(SHAPES, side=side, transposed=True)
    found = kl.run_kernel(made, line, *turned)
    close_gradients(found, product(line, [f.mT for f in turned], side), (x, *turned))


@pytest.mark.parametrize("epilogue", [kl.Bias(), (kl.Bias(), kl.Gelu())], ids=str)
@SIDE
def test_gradients_of_epilogues(side, epilogue, seed):
    made = kl.KroneckerProduct(((2, 3), (2, 2)), side=side, epilogue=epilogue)
    x, factors = operands(made.shapes, 3, side, grad=True)

    def function(x, bias, *factors):
        return kl.run_kernel(made, x, *factors, bias=bias)

    check(function, (x, leaf(made.out_features), *factors))


@SIDE
def test_operands_of_any_strides_that_are_leaves_or_not(side, seed):
    x, factors = operands(SHAPES, 6, side)
    y = randn(*product(x, factors, side).shape)
    given = (y, *leaf(2).detach().unbind(), x, *factors)
    contiguous = tuple(t.clone().requires_grad_() for t in given)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(whole(side, *contiguous), contiguous, grad)
    for place in (0, 3, 4, 5):
        for name, other in layouts(given[place]):
            if name != "negated":  # which as a leaf is no view of anything
                own = other.detach().requires_grad_()
                tensors = (*contiguous[:place], own, *contiguous[place + 1 :])
                found = torch.autograd.grad(whole(side, *tensors), tensors, grad)
                torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
            root = given[place].clone().requires_grad_()
            views = {"whole": root * 1, **dict(layouts_of(root))}
            for view in views.values():
                tensors = (*contiguous[:place], view, *contiguous[place + 1 :])
                leaves = (*contiguous[:place], root, *contiguous[place + 1 :])
                found = torch.autograd.grad(whole(side, *tensors), leaves, grad)
                torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def layouts_of(root):
    """Of a leaf, which are not leaves."""
    yield "turned", root.mT.contiguous().mT
    yield "strided", torch.stack((root, 2 * root), -1)[..., 0]
    yield "padded", torch.nn.functional.pad(root, (1, 2, 3, 1))[3:-1, 1:-2]


@SIDE
def test_a_gradient_of_any_strides_is_taken(side, seed):
    x, factors = operands(SHAPES, 6, side, grad=True)
    found = kl.kron_matmul(x, factors, side=side)
    m, n = found.shape
    zero = torch._efficientzerotensor((m, n), dtype=found.dtype)
    for grad in (randn(1, n).expand(m, n), randn().expand(m, n), randn(n, m).mT, zero):
        ours = torch.autograd.grad(found, (x, *factors), grad, retain_graph=True)
        theirs = torch.autograd.grad(found, (x, *factors), grad.clone(), retain_graph=True)
        torch.testing.assert_close(ours, theirs)


@SIDE
def test_a_record_changes_no_value(side, seed):
    x, factors = operands(SHAPES, 6, side)
    tensors = randn(1), randn(), randn(), x, *factors
    wanted = whole(side, *tensors)
    for place in range(len(tensors)):
        given = [t.clone().requires_grad_(index == place) for index, t in enumerate(tensors)]
        found = whole(side, *given)
        assert found.requires_grad
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-13, atol=1e-13)


def test_gradients_of_numbers_keep_their_dtype(seed):
    x, factors = operands(SHAPES, 3, dtype=torch.float32)
    y = torch.randn(15)
    for dtype in (torch.float32, torch.float64):
        alpha, beta = (torch.tensor(v, dtype=dtype, requires_grad=True) for v in (2.0, 3.0))
        kl.kron_matmul(x, factors, alpha=alpha, beta=beta, y=y).sum().backward()
        assert alpha.grad.dtype == beta.grad.dtype == dtype
        torch.testing.assert_close(
            alpha.grad.double(), product(x, factors).sum(), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(beta.grad.double(), 3 * y.double().sum(), rtol=1e-4, atol=1e-4)


# What is recorded and kept.


def kept(function) -> int:
    """How many tensors a record of a call holds."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        function()
    return len(found)


@SIDE
def test_without_a_record_nothing_is_kept(side, seed):
    x, factors = operands(((20, 20), (20, 20)), 3, side, grad=True)
    assert kept(lambda: kl.kron_matmul(x, factors, side=side)) > 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for alpha in (1.0, 2.0):
                call = partial(kl.kron_matmul, x, factors, side=side, alpha=alpha)
                assert kept(call) == 0 and call().grad_fn is None and not call().requires_grad
    detached = [t.detach() for t in (x, *factors)]
    assert not kl.kron_matmul(detached[0], detached[1:], side=side).requires_grad


@pytest.mark.parametrize("place", range(3))
def test_what_needs_no_gradient_gets_none(place, seed):
    x, factors = operands(SHAPES, 3)
    tensors = [x, *factors]
    tensors[place].requires_grad_()
    kl.kron_matmul(x, factors, alpha=2.0).sum().backward()
    assert [t.grad is not None for t in tensors] == [index == place for index in range(3)]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("shapes", [((20, 20), (20, 20)), ((20, 3),), SHAPES], ids=str)
def test_an_operand_changed_before_the_backward_is_noticed_or_was_copied(shapes, place, seed):
    x, factors = operands(shapes, 3, grad=True)
    tensors = (x, *factors)
    wanted = torch.autograd.grad(kl.kron_matmul(x, factors).sum(), tensors)
    y = kl.kron_matmul(x, factors)
    with torch.no_grad():
        tensors[min(place, len(factors))].mul_(2)
    try:
        found = torch.autograd.grad(y.sum(), tensors)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("numbers", [{}, {"alpha": 0.5}], ids=str)
def test_autocast_gives_gradients_in_the_parameters_dtype(numbers, seed):
    x, factors = operands(MANY["three"], 33, dtype=torch.float32, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = kl.kron_matmul(x, factors, **numbers)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (x, *factors)]
    kl.kron_matmul(wide[0], wide[1:], **numbers).square().sum().backward()
    for ours, theirs in zip((x, *factors), wide, strict=True):
        assert ours.grad.dtype == torch.float32
        assert (ours.grad - theirs.grad).norm() < 3e-2 * theirs.grad.norm()
