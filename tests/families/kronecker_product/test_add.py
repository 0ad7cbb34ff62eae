"""``Add``, an epilogue that adds a multiple of a tensor of the result's shape, by its reference."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.epilogues import Add
from tests.families.kronecker_product.cases import (
    SHAPES,
    SIDES,
    assert_near,
    operands,
    product,
    randn,
)

SIDE = pytest.mark.parametrize("side", SIDES)
EPILOGUE = (kl.Scale("alpha"), Add(), kl.Tanh())


def run(x, factors, side="right", epilogue=EPILOGUE, **arguments):
    descriptor = kl.KroneckerProduct(SHAPES, side=side, epilogue=epilogue)
    return kl.run_kernel(descriptor, x, *factors, **arguments)


@SIDE
def test_it_stands_anywhere_among_epilogues(side, seed):
    x, factors = operands(SHAPES, 4, side)
    wanted = product(x, factors, side)
    for shape in (wanted.shape, (1, wanted.shape[-1]), (wanted.shape[-2], 1), ()):
        y = randn(*shape)
        found = run(x, factors, side, alpha=0.1, beta=-0.2, y=y)
        assert_near(found, torch.tanh(0.1 * wanted - 0.2 * y))


@pytest.mark.parametrize("beta", [0, torch.tensor(0.0)], ids=str)
def test_of_a_beta_of_0_y_counts_for_nothing(beta, seed):
    x, factors = operands(SHAPES, 4)
    y = torch.full((15,), math.nan).double()
    assert_near(run(x, factors, epilogue=Add(), beta=beta, y=y), product(x, factors))
    y.fill_(1).requires_grad_()
    beta = torch.tensor(0.0).double().requires_grad_()
    run(x, factors, epilogue=Add(), beta=beta, y=y).sum().backward()
    assert beta.grad == 60 and not y.grad.any()


@SIDE
def test_of_a_vector_it_is_one(side, seed):
    x, factors = operands(SHAPES, 1, side)
    wanted, y = product(x, factors, side).flatten(), randn(len(product(x, factors, side).flatten()))
    given = {"epilogue": Add(), "beta": 2.0}
    assert_near(run(x.flatten(), factors, side, y=y, **given), wanted + 2 * y)
    with pytest.raises(ValueError, match=r"y must broadcast to \(\d+,\), got \(1, \d+\)"):
        run(x.flatten(), factors, side, y=y[None], **given)
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    assert_near(compiled(x.flatten(), factors, side, y=y, **given), wanted + 2 * y)


def test_gradients(seed):
    x, factors = operands(SHAPES, 3, grad=True)
    numbers = [torch.tensor(n).double().requires_grad_() for n in (0.3, -0.7)]

    def call(x, *rest):
        *factors, alpha, beta, y = rest
        return run(x, factors, alpha=alpha, beta=beta, y=y)

    given = (x, *factors, *numbers, randn(15, grad=True))
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)


def test_vmap_over_x(seed):
    x, factors = operands(SHAPES, 3)
    y, many = randn(3, 15), torch.stack((x, 2 * x))
    found = torch.vmap(lambda x: run(x, factors, epilogue=Add(), beta=3, y=y))(many)
    assert_near(found, product(many, factors) + 3 * y)


def test_an_x_of_one_row_may_have_a_vector_y_for_out(seed):
    x, factors = operands(SHAPES, 1)
    out = randn(1, 15)
    wanted = product(x, factors) + out
    run(x, factors, epilogue=Add(), beta=1.0, y=out[0], out=out)
    assert_near(out, wanted)


OTHERS = {
    "pairwise": lambda: kl.Pairwise(epilogue=Add()),
    "Kronecker-sparse": lambda: kl.KroneckerSparse(2, 4, 4, 1, epilogue=(kl.Bias(), Add())),
    "sparse": lambda: kl.SparseMatmul(Add()),
}


@pytest.mark.parametrize("family", OTHERS)
def test_families_whose_kernels_read_no_summand_refuse_it(family):
    with pytest.raises(ValueError, match=r"Add\(\) takes a tensor of the result's shape"):
        OTHERS[family]()
