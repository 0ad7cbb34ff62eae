"""What is done with products of Kronecker products before anybody makes them."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_product import ahead
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
    for tensors in ((x, *factors), [t.to("meta") for t in (x, *factors)]):
        assert kl.prepare(made, *tensors) is None and ahead.prepared(made, *tensors)
        assert kl.prepare(made, *tensors, out=torch.empty_like(wanted).to(tensors[0])) is None
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@SIDE
def test_kernels_are_those_of_an_arch_and_of_no_number_of_rows(side, arch):
    made = kl.KroneckerProduct(SHAPES, side=side)
    factors = [torch.empty(shape, device="meta") for shape in SHAPES]
    found = []
    for rows in (300, 601, 10**6):
        shape = (rows, made.in_features) if side == "right" else (made.in_features, rows)
        x = torch.empty(shape, device="meta")
        found.append(ahead.specs(made, arch, (x, *factors), {}))
    assert found[0] == found[1] == found[2]
    assert all(isinstance(one, KernelSpec) and one.family == made.family for one in found[0])


def test_what_cannot_be_tuned_is_said(seed):
    made, *tensors = given("right")
    with pytest.raises(kl.UnsupportedError):
        kl.tune(made, *tensors)


def test_dtypes_without_kernels_are_named():
    with pytest.raises(TypeError, match=r"dtypes: .*int8"):
        kl.compile(kl.KroneckerProduct(SHAPES), archs="sm_90a", dtypes=torch.int8)
