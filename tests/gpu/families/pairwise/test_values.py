"""Values on the GPU against float64: every stage, exponent, dtype and size that selects code."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import stages
from tests.gpu.families.pairwise.cases import (
    all_combinations,
    check,
    points,
    reference,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("either")
INF = math.inf
EXPONENTS = (0, 0.3, 0.5, 0.7, 1, 1.3, 1.5, 2, 2.5, 3, 4, 6, INF, 1 + 1e-7)
SHAPES = ((1, 1, 1), (33, 65, 7), (129, 127, 8), (200, 131, 19), (128, 256, 64), (257, 133, 1023))


@pytest.mark.parametrize("descriptor", all_combinations(), ids=lambda d: d.describe())
def test_the_predecessors_combinations(descriptor, seed):
    a, b = points(37, 21), points(45, 21)
    arguments = {}
    if isinstance(descriptor.inner, stages.Power):
        arguments["inner_p"] = 1.7
    if isinstance(descriptor.outer, stages.Power):
        arguments["outer_p"] = 0.6
    if descriptor.epilogue:
        arguments["bandwidth"] = 40.0
    wanted = reference(descriptor, a, b, **arguments)
    out = kl.run_kernel(descriptor, a, b, **arguments).double().cpu()
    assert torch.equal(out.isnan(), wanted.isnan())
    finite = wanted.isfinite() & (wanted.abs() < 1e30)
    if finite.any():  # signed sums cancel: compare with the size of what was summed
        scale = max(wanted[finite].abs().max().item(), 1e-3)
        assert (out[finite] - wanted[finite]).abs().max().item() <= 1e-4 * scale


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_p_distances(p, shape, seed):
    m, n, k = shape
    tolerance = 5e-6 * max(1, 1 / p if p else 1) * max(1, math.sqrt(k / 1024))
    check(kl.p_distance(), points(m, k), points(n, k), p=p, tolerance=tolerance)


@pytest.mark.parametrize("p", (0.0, 0.5, 1.0, 1.3, 2.0, 3.0, INF))
def test_p_on_the_device_equals_p_on_the_host(p, seed):
    a, b = points(130, 77), points(67, 77)
    a[3] = b[5]
    on_device = kl.cdist(a, b, p=torch.tensor(p, device="cuda"))
    assert relative_error(on_device, kl.cdist(a, b, p=p)) <= 5e-6


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", (0.5, 1, 1.3, 2, INF))
def test_dtypes(dtype, shape, p, seed):
    m, n, k = shape
    tolerance = 1e-12 if dtype == torch.float64 else None
    a, b = points(m, k, dtype=dtype, scale=0.5), points(n, k, dtype=dtype, scale=0.5)
    if p == 0.5 and dtype == torch.float16:
        a, b = a[:, :64], b[:, :64]  # the root squares the sum: 1023 terms pass 65504
    check(kl.p_distance(), a, b, p=p, tolerance=tolerance)


NAMED = (
    (kl.l1_distance(), {}),
    (kl.l2_distance(), {}),
    (kl.squared_distance(), {}),
    (kl.dot_product(), {}),
    (kl.laplace_l1(), {"bandwidth": 30.0}),
    (kl.laplace_l2(), {"bandwidth": 5.0}),
    (kl.laplace_pq(), {"bandwidth": 9.0, "p": 1.3, "q": 0.9}),
    (kl.gaussian(), {"bandwidth": 6.0}),
    (kl.matern32(), {"bandwidth": 5.0}),
    (kl.matern52(), {"bandwidth": 5.0}),
    (kl.rational_quadratic(), {"bandwidth": 5.0, "alpha": 1.7}),
    (kl.cauchy(), {"bandwidth": 5.0}),
    (kl.polynomial(2), {"gamma": 0.1, "offset": 1.0}),
    (kl.polynomial(3), {"gamma": 0.1, "offset": 1.0}),
    (
        kl.Pairwise(epilogue=(kl.Custom("tanh(gain * v) + erf(v / 50)", ("gain",)), kl.Scale())),
        {"gain": 0.02, "scale": -3.0},
    ),
)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("descriptor, arguments", NAMED, ids=lambda x: str(x)[:60])
def test_named_kernels(descriptor, arguments, dtype, seed):
    a, b = points(131, 37, dtype=dtype), points(90, 37, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    check(descriptor, a, b, tolerance=tolerance, **arguments)


@pytest.mark.parametrize("k", (0, 1, 7, 9, 127, 128, 129, 144, 1024, 4097))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_promotion_at_every_length(k, dtype, seed):
    tolerance = 2e-7 if dtype == torch.float32 else 1e-15
    out = check(kl.l1_distance(), points(150, k, dtype=dtype), points(140, k, dtype=dtype),
                tolerance=tolerance)  # fmt: skip
    assert k or (out == 0).all()


def test_functions_of_the_expression_language(seed):
    a, b = points(40, 12), points(30, 12)
    for text in (
        "abs(v - c)", "cos(v)", "erf(v / c)", "exp(-v)", "expm1(-v)", "log(v + c)", "log1p(v)",
        "max(v, c)", "min(v, c)", "pow(v, c / 10)", "sin(v)", "sqrt(v)", "tanh(v / c)",
        "v ** 3 - v ** 0.5 + pi / c - e", "(v + 1) ** -c / 1e3",
    ):  # fmt: skip
        parameters = ("c",) if "c" in text.replace("cos", "") else ()
        arguments = {"c": 10.0} if parameters else {}
        epilogue = kl.Custom(text, parameters)
        check(kl.Pairwise(epilogue=epilogue), a, b, tolerance=2e-5, **arguments)


@pytest.mark.parametrize("bad", (math.nan, INF, -INF))
@pytest.mark.parametrize("p", (0.5, 1, 1.3, 1.5, 2, 2.5, 3, 4, 6, INF))
def test_non_finite_values_are_never_lost(bad, p, seed):
    a, b = points(40, 37), points(40, 37)
    a[7, 36] = bad  # in the part of K that fills no whole stage
    b[9, 0] = bad
    out = kl.cdist(a, b, p=p).double().cpu()
    wanted = reference(kl.p_distance(), a, b, p=p)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
    assert not wanted[7].isfinite().any() and not wanted[:, 9].isfinite().any()


@pytest.mark.parametrize("descriptor, arguments", (
    (kl.l1_distance(symmetric=True), {}),
    (kl.gaussian(symmetric=True), {"bandwidth": 6.0, "regularization": 0.5}),
    (kl.p_distance(symmetric=True), {"p": 1.3}),
    (kl.dot_product(symmetric=True), {}),
), ids=lambda x: str(x)[:50])  # fmt: skip
@pytest.mark.parametrize("m, k", ((1, 5), (63, 5), (129, 40), (700, 300), (1500, 19)))
def test_symmetric_equals_full_and_its_transpose(descriptor, arguments, m, k, seed):
    a = points(m, k)
    out = check(descriptor, a, tolerance=5e-6, **arguments)
    assert torch.equal(out, out.T)
    full = kl.run_kernel(descriptor.replace(symmetric=False), a, a, **arguments)
    assert relative_error(out, full) <= 1e-6


@pytest.mark.parametrize("p", (0.0, INF))
def test_odd_values_at_the_odd_exponents(p, seed):
    a, b = points(40, 9), points(40, 9)
    a[0, 0], a[1, 1], a[2, 2] = math.nan, INF, 1e-40
    b[3] = a[2]
    b[3, 2] = 2e-40
    wanted = reference(kl.p_distance(), a, b, p=p)
    for form in (p, torch.tensor(p, device="cuda")):
        out = kl.cdist(a, b, p=form).double().cpu()
        assert torch.allclose(out, wanted, rtol=1e-6, atol=1e-38, equal_nan=True), form
