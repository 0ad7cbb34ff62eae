"""The k smallest and largest of each row on the GPU against a stable sort of the matrix."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.reductions import kernels
from kernlib.families.pairwise.reductions.arguments import Nearest, request_of, shape_of
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.pairwise.cases import points, reference

SQUARES = kl.squared_distance()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-13}

# Of squared distances of a thirty-second of the points' squares; smaller ones are differences.
PRODUCTS = 2e-5


def by_kernels(descriptor, a, b, k, **values) -> bool:
    request = request_of(descriptor, a, b, None, 0, 0, values)
    return kernels.plan(Nearest(k, False), request, shape_of(request)) is not None


def check(descriptor, a, b, k, largest=False, exact=False, relative=None, **values) -> None:
    """Values within a tolerance, each that of its place, places of a row all different; ``exact``:
    the places of a stable sort, for values that are exact."""
    found, places = (t.cpu() for t in kl.kernel_topk(descriptor, a, b, k, largest, **values))
    matrix = reference(descriptor, a, b, **values)
    wanted, order = matrix.sort(dim=-1, descending=largest, stable=True)
    assert found.shape == places.shape == wanted[..., :k].shape and found.dtype == a.dtype
    assert places.min() >= 0 and places.max() < matrix.shape[-1]
    relative = TOLERANCE[a.dtype] if relative is None else relative
    tolerance = {"rtol": relative, "atol": relative * 0.05, "equal_nan": True}
    torch.testing.assert_close(found.double(), wanted[..., :k], **tolerance)
    torch.testing.assert_close(found.double(), matrix.gather(-1, places), **tolerance)
    assert (places.sort(-1).values.diff(dim=-1) > 0).all()
    if exact:
        assert torch.equal(places, order[..., :k])


@pytest.mark.parametrize("size", [(1, 1), (5, 129), (301, 777), (67, 40_001)], ids=str)
@pytest.mark.parametrize("features", [3, 16, 20, 130])
def test_sizes(size, features, seed):
    a, b = points(size[0], features), points(size[1], features)
    for k in (1, 2, 10, 64, 128, 200):
        check(SQUARES, a, b, min(k, size[1]), largest=k == 10)


def test_who_computes_it():
    for features, k, taken in ((3, 128, True), (3, 129, False), (64, 10, True), (300, 17, False)):
        a = torch.empty(500, features, device="cuda")
        assert by_kernels(SQUARES, a, a, k) == taken
    assert not by_kernels(SQUARES, a.double(), a.double(), 1)


NEGATED = kl.Pairwise(epilogue=kl.Custom("-v"))


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("features", [3, 20])
def test_equal_values_nan_and_infinities(features, largest, seed):
    a = torch.randint(0, 3, (400, features), device="cuda").float()
    b = torch.randint(0, 3, (5000, features), device="cuda").float()
    descriptor = kl.l1_distance()
    for k in (1, 10, 64, 200):
        check(descriptor, a, b, k, largest, exact=True)
    odd, row = b.clone(), a.clone()
    odd[::7], odd[5::11], row[3] = math.nan, math.inf, math.nan
    mostly = odd[:40].clone()
    mostly[:37] = math.nan
    for k in (1, 10, 40):
        check(descriptor, row, odd, k, largest, exact=True)
        check(descriptor, row, mostly, k, largest, exact=True)
    zeros, ones = torch.zeros(300, features, device="cuda"), torch.ones(70_000, features).cuda()
    check(descriptor, zeros, ones, 10, largest, exact=True)
    check(descriptor, zeros.double(), ones[:5000].double(), 10, largest, exact=True)


def test_a_nan_with_a_sign_is_the_largest(seed):
    """Which a negation makes, in lists too long for kernels."""
    a = torch.randn(7, 3, device="cuda")
    b = torch.randn(5000, 3, device="cuda")
    b[77] = math.nan
    for dtype in (torch.float32, torch.float64):
        for k in (10, 3000):
            values, places = kl.kernel_topk(NEGATED, a.to(dtype), b.to(dtype), k, True)
            assert places[:, 0].eq(77).all() and values[:, 0].isnan().all()
            assert not values[:, 1:].isnan().any()


@pytest.fixture
def products(monkeypatch):
    """Tensor cores take what they can, however small."""
    monkeypatch.setattr(reduce, "split_pays", lambda problem: True)
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize("size", [(1, 1), (5, 129), (301, 777), (130, 20_001)], ids=str)
@pytest.mark.parametrize("features", [20, 64, 130])
def test_products(size, features, products, seed):
    a, b = points(size[0], features), points(size[1], features)
    for k in (1, 10, 16):
        check(SQUARES, a, b, min(k, size[1]), relative=PRODUCTS)
    check(kl.dot_product(), a.abs() + 0.1, b.abs() + 0.1, min(10, size[1]), True, relative=PRODUCTS)
    half = size[0] // 2
    b[:half] = a[:half]
    check(SQUARES, a, b, min(10, size[1]), relative=PRODUCTS)
    b[::50] = math.nan
    check(SQUARES, a, b, min(10, size[1]), True, relative=PRODUCTS)
    b[::3] = math.nan  # which leaves it to the kernel behind the gate
    check(SQUARES, a, b, min(10, size[1]), relative=PRODUCTS)


@pytest.mark.parametrize("largest", [False, True])
def test_products_take_the_first_of_equal_points(largest, products, seed):
    a, b = points(400, 64), points(2000, 64).repeat(2, 1)
    values, places = kl.kernel_topk(SQUARES, a, b, 10, largest)
    first, second = places[:, ::2], places[:, 1::2]
    assert (first < 2000).all() and torch.equal(first + 2000, second)
    assert torch.equal(values[:, ::2], values[:, 1::2])
    check(kl.squared_distance(symmetric=True), a, None, 10, largest, relative=PRODUCTS)


def test_products_take_the_first_of_values_that_are_all_equal(products):
    """Those of pairs computed by differences too, which come behind those of later columns."""
    x = points(500, 64)
    values, places = kl.kernel_topk(kl.gaussian(), x, x, 10, True, bandwidth=1e9)
    assert (values == 1).all()
    assert torch.equal(places, torch.arange(10, device="cuda").expand(500, 10))


def test_products_in_tf32(products):
    a, b = points(700, 200), points(3000, 200)
    found, places = kl.kernel_topk(kl.squared_distance(precision="tf32"), a, b, 16)
    matrix = reference(SQUARES, a, b)
    torch.testing.assert_close(
        found.cpu().double(), matrix.sort(-1).values[:, :16], rtol=1e-2, atol=0
    )
    assert (places.sort(-1).values.diff(dim=-1) > 0).all()


def test_no_negative_zero():
    a, b = torch.zeros(5, 3, device="cuda"), torch.full((9, 3), 100.0, device="cuda")
    values, _ = kl.kernel_topk(kl.gaussian(), a, b, 2, True, bandwidth=0.1)
    assert (values == 0).all() and not values.signbit().any()


DESCRIPTORS = {
    "gaussian": (kl.gaussian(), {"bandwidth": 3.0}),
    "epsilon": (kl.laplace_l1(), {"bandwidth": 3.0, "epsilon": 1e-3}),
    "pq": (kl.laplace_pq(), {"bandwidth": 3.0, "p": 1.3, "q": 0.9}),
    "norms out of range": (kl.p_distance(), {"p": 1.3}),
    "dot": (kl.dot_product(), {}),
    "regularized": (
        kl.gaussian(),
        {"bandwidth": 2.0, "regularization": 0.7, "row_offset": 90, "col_offset": 2},
    ),
}


@pytest.mark.parametrize("features", [5, 21])
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_descriptors(name, features, seed):
    descriptor, values = DESCRIPTORS[name]
    scale = 1e20 if name == "norms out of range" else 1.0
    a, b = points(301, features, scale=scale), points(777, features, scale=scale)
    found, places = kl.kernel_topk(descriptor, a, b, 10, True, **values)
    matrix = reference(descriptor, a, b, **values)
    wanted = matrix.topk(10).values
    margin = 4e-6 * matrix.abs().max().item()
    assert ((found.cpu() - wanted).abs() <= margin).all()
    assert ((found.cpu() - matrix.gather(-1, places.cpu())).abs() <= margin).all()


@pytest.mark.parametrize("features", [5, 21])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, features, seed):
    check(SQUARES, points(300, features, dtype=dtype), points(900, features, dtype=dtype), 10)


@pytest.mark.parametrize("features", [5, 21])
def test_batches_and_strides(features, seed):
    a, b = points(3, 200, features), points(700, features)
    bandwidth = torch.tensor([2.0, 3.0, 4.0], device="cuda")
    check(kl.laplace_l2(), a, b, 5, bandwidth=bandwidth)
    check(SQUARES, a[0], torch.stack((b, 2 * b)), 5)
    check(SQUARES, a[0].mT.contiguous().mT, points(700, 2 * features)[:, ::2], 10)
    check(kl.squared_distance(symmetric=True), b, None, 10)


@pytest.mark.parametrize("features", [3, 40])
def test_the_same_bits_each_time(features, seed):
    a, b = points(3000, features), points(20_000, features)
    first = kl.kernel_topk(SQUARES, a, b, 10)
    for _ in range(3):
        again = kl.kernel_topk(SQUARES, a, b, 10)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("features", [3, 40])
def test_gradients_are_those_of_the_pairs(features, seed):
    a, b = points(200, features).requires_grad_(), points(300, features).requires_grad_()
    found, places = kl.kernel_topk(SQUARES, a, b, 4)
    along = points(200, 4)
    wanted = ((a[:, None] - b[places]) ** 2).sum(-1)
    slopes = (torch.autograd.grad(out, (a, b), along) for out in (found, wanted))
    for x, y in zip(*slopes, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
