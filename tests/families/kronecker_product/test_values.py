"""Products with Kronecker products on CPU tensors: their values against the formula in float64."""

import itertools
import math

import pytest
import torch
from torch.nn import functional as F

import kernlib as kl
from tests.families.kronecker_product.cases import (
    GATES,
    MANY,
    SHAPES,
    SIDES,
    SIZES,
    assert_near,
    layouts,
    operands,
    product,
    randn,
)

SIDE = pytest.mark.parametrize("side", SIDES)
DTYPE = pytest.mark.parametrize("dtype", GATES, ids=str)


def by_descriptor(x, factors, side="right", **arguments):
    """The same by ``run_kernel``."""
    made = kl.KroneckerProduct(tuple(tuple(f.shape[-2:]) for f in factors), side=side)
    return kl.run_kernel(made, x, *factors, **arguments)


@DTYPE
@SIDE
@pytest.mark.parametrize("name", MANY)
def test_a_product_is_its_formula(name, side, dtype, seed):
    x, factors = operands(MANY[name], 9, side, dtype)
    found = kl.kron_matmul(x, factors, side=side)
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, product(x, factors, side))
    assert torch.equal(found, by_descriptor(x, factors, side))
    # Of tensors that require a gradient torch.matmul folds others, whose bits differ.
    for again in (tuple(factors), torch.nn.ParameterList(factors).requires_grad_(False)):
        assert torch.equal(found, kl.kron_matmul(x, again, side=side))


@SIDE
def test_factors_may_be_stacked(side, seed):
    factors = randn(3, 4, 4, dtype=torch.float64).requires_grad_()
    x = randn(*((5, 64) if side == "right" else (64, 5)), dtype=torch.float64)
    found, wanted = (kl.kron_matmul(x, f, side=side) for f in (factors, list(factors)))
    assert torch.equal(found, wanted)
    to_stack, to_list = (torch.autograd.grad(y.sum(), factors)[0] for y in (found, wanted))
    assert torch.equal(to_stack, to_list)


@SIDE
@pytest.mark.parametrize("size", SIZES)
def test_any_size(size, side, seed):
    for other in (1, 3, size):
        for shapes in (((size, other), (2, 3)), ((3, 2), (other, size))):
            x, factors = operands(shapes, 4, side, torch.float32)
            terms = product(x.abs(), [f.abs() for f in factors], side)
            found = kl.kron_matmul(x, factors, side=side)
            axis = 1 if side == "right" else 0
            assert_near(found, product(x, factors, side), axis=axis, terms=terms)


@SIDE
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 127, 129])
def test_any_number_of_rows(rows, side, seed):
    x, factors = operands(SHAPES, rows, side)
    found = kl.kron_matmul(x, factors, side=side)
    assert_near(found, product(x, factors, side))
    out = torch.full_like(found, math.nan)
    assert kl.kron_matmul(x, factors, side=side, out=out) is out
    assert torch.equal(out, found)


@SIDE
def test_it_is_torchs_kron(side, seed):
    x, factors = operands(((3, 2), (2, 5), (4, 3)), 6, side)
    made = torch.kron(torch.kron(factors[0], factors[1]), factors[2])
    wanted = x @ made if side == "right" else made @ x
    torch.testing.assert_close(kl.kron_matmul(x, factors, side=side), wanted)
    eye = torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(kl.kron_matmul(eye, factors), made)


@SIDE
def test_any_strides(side, seed):
    x, factors = operands(SHAPES, 6, side)
    wanted = product(x, factors, side)
    for name, other in layouts(x):
        assert torch.equal(other, x), name
        assert_near(kl.kron_matmul(other, factors, side=side), wanted)
    for place in range(2):
        for _, other in layouts(factors[place]):
            given = [other if index == place else f for index, f in enumerate(factors)]
            assert_near(kl.kron_matmul(x, given, side=side), wanted)
            assert_near(kl.kron_matmul(x, given, side=side, alpha=2.0), 2 * wanted)


@SIDE
def test_any_strides_of_batches(side, seed):
    x, factors = randn(2, 1, 8, 15), [randn(3, 2, 3), randn(2, 1, 4, 5)]
    x = x.mT if side == "right" else randn(2, 1, 15, 6)
    wanted = product(x, factors, side)
    for name, other in layouts(x):
        assert torch.equal(other, x), name
        assert_near(kl.kron_matmul(other, factors, side=side), wanted)
    for pair in zip(*map(layouts, factors), strict=True):
        assert_near(kl.kron_matmul(x, [f for _, f in pair], side=side), wanted)


@SIDE
def test_expanded_operands_are_taken(side, seed):
    one = torch.ones(1, dtype=torch.float64)
    shape, out = ((3, 8), (3, 15)) if side == "right" else ((15, 3), (8, 3))
    factors = [one.expand(2, 3), one.expand(4, 5)]
    found = kl.kron_matmul(one.expand(shape), factors, side=side)
    assert torch.equal(found, torch.full(out, 8.0 if side == "right" else 15.0).double())
    x, factors = operands(SHAPES, 1, side)
    wider = x.expand(7, *x.shape)
    assert_near(kl.kron_matmul(wider, factors, side=side), product(wider, factors, side))
    several = [factors[0].expand(4, 2, 3), factors[1]]
    assert_near(kl.kron_matmul(x, several, side=side), product(x, several, side))


@SIDE
@pytest.mark.parametrize("name", MANY)
def test_a_vector_is_one_row_or_column(name, side, seed):
    x, factors = operands(MANY[name], 1, side)
    wanted, x = product(x, factors, side).reshape(-1), x.reshape(-1)
    for alpha in (1.0, 3.0):
        found = kl.kron_matmul(x, factors, side=side, alpha=alpha)
        assert_near(found, alpha * wanted)
        out = torch.full_like(wanted, math.nan)
        assert kl.kron_matmul(x, factors, side=side, alpha=alpha, out=out) is out
        assert torch.equal(out, found)
    spread = torch.full((2 * len(wanted),), math.nan, dtype=x.dtype)[::2]
    assert torch.equal(by_descriptor(x, factors, side, out=spread), by_descriptor(x, factors, side))


@SIDE
def test_a_vector_meets_batches_of_factors(side, seed):
    x, factors = operands(SHAPES, 1, side)
    factors = [randn(4, 1, 2, 3), randn(3, 4, 5)]
    wanted = product(x, factors, side).squeeze(-2 if side == "right" else -1)
    found = kl.kron_matmul(x.reshape(-1), factors, side=side)
    assert_near(found, wanted)
    out = torch.empty_like(wanted)
    assert torch.equal(kl.kron_matmul(x.reshape(-1), factors, side=side, out=out), found)


BATCHES = [(), (1,), (3,), (2, 1), (2, 3), (1, 1, 3)]


@SIDE
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_batches_broadcast_in_every_combination(batch, side, seed):
    x = randn(*batch, *((2, 8) if side == "right" else (15, 2)))
    for first, second in itertools.product(BATCHES, repeat=2):
        factors = [randn(*first, 2, 3), randn(*second, 4, 5)]
        wanted = product(x, factors, side)
        found = kl.kron_matmul(x, factors, side=side)
        assert_near(found, wanted)
        assert found.is_contiguous() and found.shape[:-2] == torch.broadcast_shapes(
            batch, first, second
        )


@SIDE
@pytest.mark.parametrize("batches", [((0,), (), ()), ((), (0,), ()), ((2, 1), (), (2, 0))], ids=str)
def test_empty_batches(batches, side):
    x = randn(*batches[0], *((2, 8) if side == "right" else (15, 2)))
    factors = [randn(*batches[1], 2, 3), randn(*batches[2], 4, 5)]
    for arguments in ({}, {"alpha": 2.0}, {"beta": 1.0, "y": randn(1)}):
        found = kl.kron_matmul(x, factors, side=side, **arguments)
        assert found.shape == product(x, factors, side).shape and found.dtype == x.dtype


# alpha, beta and y.

SUMMANDS = {
    "whole": lambda m, n: randn(m, n),
    "a row": lambda m, n: randn(1, n),
    "a vector": lambda m, n: randn(n),
    "a column": lambda m, n: randn(m, 1),
    "a number": lambda m, n: randn(),
    "(1, 1)": lambda m, n: randn(1, 1),
    "expanded": lambda m, n: randn(1, n).expand(m, n),
    "turned": lambda m, n: randn(n, m).mT,
    "strided": lambda m, n: randn(2 * m, 3 * n)[1::2, ::3],
    "unaligned": lambda m, n: randn(m * n + 1)[1:].view(m, n),
    "negated": lambda m, n: torch._neg_view(randn(m, n)),
}


@SIDE
@pytest.mark.parametrize("name", SUMMANDS)
def test_any_y_that_broadcasts(name, side, seed):
    x, factors = operands(SHAPES, 7, side)
    wanted = product(x, factors, side)
    y = SUMMANDS[name](*wanted.shape)
    for alpha, beta in ((1.0, 1.0), (3.0, 0.5), (0.0, 2.0), (-1.0, -2.0), (1.0, 0.0)):
        whole = alpha * wanted + beta * y
        for give in (float, torch.tensor, lambda v: torch.tensor(v, dtype=torch.float64)):
            numbers = {"alpha": give(alpha), "beta": give(beta)}
            assert_near(kl.kron_matmul(x, factors, **numbers, y=y, side=side), whole, 1e-12)


def test_y_broadcasts_over_batches(seed):
    x, factors = randn(3, 1, 2, 8), [randn(4, 2, 3), randn(4, 5)]
    for shape in ((3, 4, 2, 15), (4, 1, 15), (3, 1, 1, 1), (2, 1), ()):
        y = randn(*shape)
        found = kl.kron_matmul(x, factors, alpha=2, beta=3, y=y)
        assert_near(found, 2 * product(x, factors) + 3 * y, 1e-12)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@SIDE
def test_a_beta_of_0_reads_no_y(side, value, grad, seed):
    x, factors = operands(SHAPES, 7, side)
    wanted = 2 * product(x, factors, side)
    y = torch.full_like(wanted, value).requires_grad_(grad)
    zeros = (0.0, 0, torch.tensor(0.0), torch.tensor(-0.0), torch.zeros((), dtype=torch.float64))
    for beta in zeros:
        found = kl.kron_matmul(x, factors, alpha=2.0, beta=beta, y=y, side=side)
        assert_near(found.detach(), wanted)
        if found.requires_grad:
            (slope,) = torch.autograd.grad(found.sum(), y)
            assert torch.equal(slope, torch.zeros_like(y))


def test_an_alpha_of_0_and_numbers_that_are_not_finite_are_torchs(seed):
    x, factors = operands(SHAPES, 7)
    assert torch.equal(kl.kron_matmul(x, factors, alpha=0.0), torch.zeros(7, 15).double())
    wanted = product(x, factors) * math.inf
    assert torch.equal(kl.kron_matmul(x, factors, alpha=math.inf), wanted)


# Precision.


@SIDE
@pytest.mark.parametrize("shapes", [((8, 8),) * 4, ((31, 5), (7, 12)), ((127, 33),)], ids=str)
def test_rows_and_factors_of_any_scale_are_accurate(shapes, side, seed):
    x, factors = operands(shapes, 61, side, torch.float32)
    axis = 1 if side == "right" else 0
    x *= (2.0 ** torch.arange(-60, 61, 2)).unsqueeze(axis)
    for exponent in (-20, 0, 20):
        scaled = [f * 2.0**e for f, e in zip(factors, (exponent, -exponent) * 2, strict=False)]
        found = kl.kron_matmul(x, scaled, side=side)
        assert_near(found, product(x, scaled, side), axis=axis)
    scaled = [factors[0] * 2.0**20, *factors[1:]]
    assert_near(kl.kron_matmul(x, scaled, side=side), product(x, scaled, side), axis=axis)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@SIDE
def test_half_types_are_rounded_once(side, dtype, seed):
    """Five factors, alpha and y: rounded in between each would add half a unit of the last place,
    5e-4 and 4e-3."""
    x, factors = operands(((6, 6),) * 3 + ((2, 3), (3, 2)), 33, side, dtype)
    gate = {torch.float16: 3e-4, torch.bfloat16: 2.4e-3}[dtype]
    wanted = product(x, factors, side)
    assert_near(kl.kron_matmul(x, factors, side=side), wanted, gate)
    y = randn(*wanted.shape, dtype=dtype)
    found = kl.kron_matmul(x, factors, side=side, alpha=0.3, beta=0.7, y=y)
    assert found.dtype == dtype
    assert_near(found, 0.3 * wanted + 0.7 * y.double(), gate)


def test_what_comes_between_may_be_more_than_float16_holds(seed):
    factors = [torch.full((16, 16), 1024.0).half(), torch.full((8, 8), 2.0**-14).half()]
    x = (torch.rand(5, 128) + 1).half() * 100
    wanted = product(x, factors)
    assert product(x, [factors[0], torch.eye(8)]).min() > 65504 > wanted.max()
    assert_near(kl.kron_matmul(x, factors), wanted)
    large = [factors[0], torch.ones(8, 8).half()]
    assert kl.kron_matmul(x, large).isinf().all()
    assert_near(kl.kron_matmul(x, large, alpha=2.0**-14), wanted)


@SIDE
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(side, value, seed):
    x, factors = operands(MANY["three"], 6, side, torch.float32)
    spoilt = x.clone()
    spoilt.select(1 if side == "left" else 0, 2).fill_(value)
    found, clean = (kl.kron_matmul(t, factors, side=side) for t in (spoilt, x))
    if side == "left":
        found, clean = found.mT, clean.mT
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found[others], clean[others])
    assert not found[2].isfinite().any()


# Settings of torch.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_a_linear_layer(dtype, seed):
    x, factors = operands(((9, 6),), 4, dtype=torch.float32)
    y = torch.randn(4, 6)
    with torch.autocast("cpu", dtype=dtype):
        found = kl.kron_matmul(x, factors)
        wanted = F.linear(x, factors[0].mT)
        scaled = kl.kron_matmul(x, factors, alpha=2.0, beta=0.5, y=y)
        kept = kl.kron_matmul(x.double(), [f.double() for f in factors], alpha=2.0)
        mixed = kl.kron_matmul(x.bfloat16(), [factors[0].half()])
    assert found.dtype == wanted.dtype == mixed.dtype == dtype and kept.dtype == torch.float64
    torch.testing.assert_close(found, wanted)
    low = [t.to(dtype) for t in (x, *factors)]
    assert torch.equal(found, kl.kron_matmul(low[0], low[1:]))
    whole = 2 * product(low[0], low[1:]) + 0.5 * y
    assert (scaled.double() - whole).norm() < 2 * GATES[dtype] * whole.norm()


def test_no_setting_of_precision_changes_cpu_results(seed):
    x, factors = operands(SHAPES, 4, dtype=torch.float32)
    wanted = kl.kron_matmul(x, factors)
    for precision in ("fp32", "tf32", "bf16"):
        assert torch.equal(kl.kron_matmul(x, factors, precision=precision), wanted)


def test_meta_tensors_give_a_shape():
    x, *factors = (t.to("meta") for t in (randn(3, 1, 2, 8), randn(4, 2, 3), randn(4, 5)))
    for arguments in ({}, {"alpha": 2.0}, {"beta": torch.tensor(1.0), "y": x[..., :1]}):
        found = kl.kron_matmul(x, factors, **arguments)
        assert found.is_meta and found.shape == (3, 4, 2, 15) and found.dtype == x.dtype
    assert kl.kron_matmul(x, factors, out=found) is found


def test_inference_mode_is_no_hindrance(seed):
    x, factors = operands(SHAPES, 4)
    with torch.inference_mode():
        out = kl.kron_matmul(x.clone(), factors, alpha=2.0)
        kl.kron_matmul(x, factors, alpha=3.0, out=out)
    assert_near(out, 3 * product(x, factors))
