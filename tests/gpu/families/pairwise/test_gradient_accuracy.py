"""Gradients on a GPU by float64, beside torch's: on hostile points, of long sums and of sums of few
terms by every kernel, and into few points."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import gradient as lowering
from tests.families.pairwise import norms
from tests.families.pairwise.derivatives import FUNCTIONS, SQUARES, compare
from tests.gpu.families.pairwise.gradient_cases import by
from tests.support import hostile

BAR = hostile.GRADIENT[torch.float32]


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_on_hostile_points(name, dtype):
    for case in hostile.cases(dtype, "cuda"):
        compare(FUNCTIONS[name], case, along=False)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", SQUARES)
def test_second_derivatives_on_hostile_points(name, dtype):
    for case in hostile.cases(dtype, "cuda"):
        compare(FUNCTIONS[name], case, along=True)


def worst(a, b, c, d, p, found=None) -> float:
    """The largest error relative to the sum of absolute terms."""
    found = (kl.cdist_grad(a, b, c, d, p=p) if found is None else found).double()
    a, b, c, d = (t.double() for t in (a, b, c, d))
    v = d[:, None] - b[:, :, None]
    slopes = v.sign() * v.abs() ** (p - 1)
    weights = c[:, :, None] * a
    wanted = torch.einsum("okm,nkm->onm", weights, slopes)
    terms = torch.einsum("okm,nkm->onm", weights.abs(), slopes.abs())
    return ((found - wanted).abs() / terms).max().item()


@pytest.mark.parametrize("way", ("direct", "mma", "wgmma"))
@pytest.mark.parametrize("sets", (1, 3, 16, 32))
@pytest.mark.parametrize("p", (1, 1.5, 2, 3))
@pytest.mark.parametrize("count", (1, 7, 64, 1000, 20000))
def test_sums_of_few_and_of_many_terms(count, p, sets, way, seed):
    if way != "direct" and sets == 1 and p != 1:
        pytest.skip("not a kernel of tensor cores")
    m, n = (70, 128) if count < 1000 else (9, 40)
    a, b = torch.randn(count, m, device="cuda"), torch.randn(n, count, device="cuda")
    c, d = torch.randn(sets, count, device="cuda"), torch.randn(n, m, device="cuda")
    # In one part, as where there are many tiles; tensor cores alone would be 2e-5 off.
    with by(way), mock.patch.object(lowering, "parts_of", lambda *_: 1):
        assert worst(a, b, c, d, p) <= BAR
        assert worst(a.abs(), b - 20, c.abs(), d, p) <= BAR  # terms of one sign
        assert worst(torch.full_like(a, 0.1), b * 0, torch.full_like(c, 0.7), d * 0 + 0.3, p) <= BAR


@pytest.mark.parametrize("p", (1, 2, 2.5))
@pytest.mark.parametrize("sets", (3, 16))
def test_large_calls_over_few_points_as_kermac_has_them(sets, p, seed):
    shapes = ((4, 64, 1000), (4, 1000, 64), (4, sets, 64), (4, 1000, 1000))
    a, b, c, d = (torch.randn(*shape, device="cuda") for shape in shapes)
    found = kl.cdist_grad(a, b, c, d, p=p)
    rows = torch.randint(1000, (20,), device="cuda")
    for l in range(4):
        one = a[l], b[l, rows], c[l], d[l, rows]
        own = found[l][:, rows]
        assert worst(*one, p, own) <= BAR
        part = kl.cdist_grad(*(t.double() for t in one), p=p)
        # As kermac's own test asks; of larger powers the terms are larger. Of a sum near 100 of a
        # thousand terms 1e-4 is 13 of float32's steps, which one of 3e5 numbers has been off by.
        if p <= 2:
            torch.testing.assert_close(own.double(), part, atol=1e-4, rtol=1e-6)
        assert (own - part).norm() <= 1e-6 * part.norm()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("min", "topk", "sum", "matmul"))
def test_many_rows_into_few_points(name, dtype, seed):
    a = torch.randn(20000, 8, device="cuda").to(dtype)
    b = torch.randn(3, 8, device="cuda").to(dtype)
    v, g = torch.randn(3, device="cuda").to(dtype), torch.rand(20000, device="cuda").to(dtype)
    call = {
        "min": lambda a, b: kl.kernel_min(kl.squared_distance(), a, b)[0],
        "topk": lambda a, b: kl.kernel_topk(kl.squared_distance(), a, b, 1)[0][:, 0],
        "sum": lambda a, b: kl.kernel_sum(kl.squared_distance(), a, b),
        "matmul": lambda a, b: kl.kernel_matmul(kl.squared_distance(), a, b, v),
    }[name]
    b.requires_grad_()
    (found,) = torch.autograd.grad(call(a, b), b, g)
    difference = b.detach().double() - a.double()[:, None]
    weights = torch.ones(20000, 3, device="cuda", dtype=torch.float64)
    if name in ("min", "topk"):
        nearest = (difference**2).sum(-1).argmin(1)
        weights = torch.nn.functional.one_hot(nearest, 3).double()
    if name == "matmul":
        weights = v.double().expand(20000, 3)
    terms = 2 * (weights * g.double()[:, None])[..., None] * difference
    hostile.check(found, terms.sum(0), terms.abs().sum(0), where=name, bars=hostile.GRADIENT)


@pytest.mark.parametrize("kernel", (False, True), ids=("distance", "kernel"))
@pytest.mark.parametrize("kind", ("equal", "near", "one feature"))
@pytest.mark.parametrize("scale", (1e-30, 1e-3, 1e4, 1e30))
@pytest.mark.parametrize("p", (0.7, 1.5, 3.0, 7.3, 20.0))
def test_slopes_of_norms_at_any_magnitude(p, scale, kind, kernel):
    sizes = (200, 333, 70) if kind == "equal" else (40, 33, 5)
    bound = 3e-6 + 4e-7 * p  # a logarithm of 22 bits counts p - 1 times
    norms.check_gradients(kind, p, scale, kernel, "cuda", sizes, bound)


@pytest.mark.parametrize("scale", (1e-30, 1e-3, 1e4, 1e30))
@pytest.mark.parametrize("p", (7.3, 20.0))
def test_so_are_those_of_reductions_of_large_exponents(p, scale):
    norms.check_sums(p, scale, "cuda", 3e-6 + 4e-7 * p)
