"""What is done with products of Kronecker products before anybody makes them."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.jit.spec import KernelSpec
from tests.families.kronecker_product.cases import SHAPES, SIDES, operands

SIDE = pytest.mark.parametrize("side", SIDES)


def given(side, **options):
    x, factors = operands(SHAPES, 3, side, torch.float32, **options)
    return kl.KroneckerProduct(SHAPES, side=side), x, *factors


@SIDE
def test_a_call_that_is_right_is_prepared(side, seed):
    made, x, *factors = given(side)
    wanted = kl.run_kernel(made, x, *factors)
    assert kl.prepare(made, x, *factors) is None and ahead.prepared(made, x, *factors)
    assert kl.prepare(made, x, *factors, out=torch.empty_like(wanted)) is None
    vector = x.flatten()[: made.in_features]
    out = torch.empty(made.out_features)
    assert kl.prepare(made, vector, *factors, out=out) is None
    assert ahead.prepared(made, vector, *factors)
    biased = made.replace(epilogue=kl.Bias())
    assert ahead.prepared(biased, x, *factors, bias=torch.ones(made.out_features))


@SIDE
def test_prepare_follows_autocast(side, seed):
    made, x, *factors = given(side)
    with pytest.raises(TypeError, match="one dtype"):
        kl.prepare(made, x, factors[0].bfloat16(), factors[1])
    with torch.autocast("cpu", torch.bfloat16):
        kl.prepare(made, x, factors[0].bfloat16(), factors[1])


@SIDE
def test_prepare_takes_no_out_of_a_recorded_call(side, seed):
    made, x, *factors = given(side, grad=True)
    kl.prepare(made, x, *factors)
    with pytest.raises(RuntimeError, match="out takes no result"):
        kl.prepare(made, x, *factors, out=kl.run_kernel(made, x, *factors).detach())


@pytest.mark.few(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@SIDE
def test_a_few_kernels_serve_all_numbers_of_rows(side, arch):
    """Tiles of powers of two, up to 128 columns."""
    made = kl.KroneckerProduct(SHAPES, side=side)
    factors = [torch.empty(shape, device="meta") for shape in SHAPES]
    found = set()
    for rows in (*range(1, 40), 100, 127, 129, 300, 601, 1000, 4099, 10**6, 10**6 + 1):
        shape = (rows, made.in_features) if side == "right" else (made.in_features, rows)
        specs = ahead.specs(made, arch, (torch.empty(shape, device="meta"), *factors), {})
        assert all(isinstance(one, KernelSpec) and one.family == made.family for one in specs)
        found |= {one.canonical() for one in specs}
    assert len(found) <= 8


def test_what_cannot_be_tuned_is_said(seed):
    made, *tensors = given("right")
    with pytest.raises(kl.UnsupportedError, match="move the tensors to a CUDA device"):
        kl.tune(made, *tensors)


def test_dtypes_without_kernels_are_named():
    with pytest.raises(TypeError, match=r"dtypes: .*int8"):
        kl.compile(kl.KroneckerProduct(SHAPES), archs="sm_90a", dtypes=torch.int8)
