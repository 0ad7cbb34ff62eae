"""Gradients at the edges: results written in place, infinite coordinates, bandwidths next to 0,
sums of half types into few points, sizes around powers of two, and several gradients at once."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.families.pairwise.derivatives import FUNCTIONS, SQUARES, compare
from tests.support import hostile
from tests.support.speeds import slow_but

A, B, V = torch.randn(6, 3), torch.randn(5, 3), torch.randn(5)
RECORDED = {
    "run_kernel": lambda a, b, v: kl.run_kernel(kl.gaussian(), a, b, bandwidth=1.0),
    "cdist": lambda a, b, v: kl.cdist(a, b),
    "cdist of half types": lambda a, b, v: kl.cdist(a.bfloat16(), b.bfloat16()),
    "kernel_matmul": lambda a, b, v: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=1.0),
    "columns": lambda a, b, v: kl.kernel_matmul(kl.gaussian(), a, b, v[:, None], bandwidth=1.0),
    "a batch": lambda a, b, v: kl.kernel_matmul(kl.gaussian(), a[None], b, v[:, None], bandwidth=1),
    "kernel_sum": lambda a, b, v: kl.kernel_sum(kl.gaussian(), a, b, bandwidth=1.0),
    "kernel_min": lambda a, b, v: kl.kernel_min(kl.gaussian(), a, b, bandwidth=1.0)[0],
    "kernel_topk": lambda a, b, v: kl.kernel_topk(kl.gaussian(), a, b, 2, bandwidth=1.0)[0],
    "cdist_expadd": lambda a, b, v: kl.cdist_expadd(a, b, scale=-1.0),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_result_may_be_written_in_place(name):
    made = []
    for in_place in (False, True):
        a, b, v = (t.clone().requires_grad_() for t in (A, B, V))
        y = RECORDED[name](a, b, v)
        if in_place:
            y += 1.0
            y.mul_(2.0)
        else:
            y = 2.0 * (y + 1.0)
        made.append(torch.autograd.grad(y.sum(), (a, b, v), allow_unused=True))
    for one, other in zip(*made, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_a_log_sum_exp_whose_value_is_needed_says_so_when_written():
    y = kl.kernel_logsumexp(kl.squared_distance(), A.clone().requires_grad_(), B)
    y += 1.0  # as that of torch.logsumexp
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("p", (0.5, 1, 1.5, 2, 2.5, 3, 7))
def test_an_infinite_coordinate_spoils_what_torch_says_it_does(p, dtype):
    made = []
    for function in (kl.cdist, torch.cdist):
        a, b = A.to(dtype).clone().requires_grad_(), B.to(dtype).clone()
        b[1, 2] = float("inf")
        b.requires_grad_()
        mode = {"compute_mode": "donot_use_mm_for_euclid_dist"} if function is torch.cdist else {}
        d = function(a, b, p=float(p), **mode)
        made.append(torch.autograd.grad(d, (a, b), torch.ones(6, 5, dtype=dtype)))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize(
    "make", (kl.laplace_l2, kl.laplace_pq, kl.gaussian, kl.matern32, kl.matern52, kl.cauchy)
)
@pytest.mark.parametrize("as_tensor", (False, True))
def test_an_infinite_coordinate_spoils_its_own_feature_of_a_kernel(make, as_tensor):
    numbers = {"bandwidth": torch.tensor(1.0) if as_tensor else 1.0}
    numbers |= {"p": 1.5, "q": 0.8} if make is kl.laplace_pq else {}
    a, b = A.clone().requires_grad_(), B.clone()
    b[1, 2] = float("inf")
    (found,) = torch.autograd.grad(kl.run_kernel(make(), a, b, **numbers).sum(), a)
    others = torch.cat((b[:1], b[2:]))
    (wanted,) = torch.autograd.grad(kl.run_kernel(make(), a, others, **numbers).sum(), a)
    torch.testing.assert_close(found[:, :2], wanted[:, :2])


@pytest.mark.few(by="make")
@pytest.mark.parametrize("bandwidth", (1e-22, 1e-20, 1e-19, 1e-18, 1e-12))
@pytest.mark.parametrize("as_tensor", (True, False))
@pytest.mark.parametrize("make", (kl.laplace_l2, kl.gaussian, kl.matern32, kl.matern52, kl.cauchy))
def test_gradients_of_a_bandwidth_far_below_all_distances_are_0(make, as_tensor, bandwidth):
    a = A.clone().requires_grad_()
    given = torch.tensor(bandwidth, requires_grad=True) if as_tensor else bandwidth
    k = kl.run_kernel(make(), a, A.clone(), bandwidth=given)
    found = torch.autograd.grad(k.sum(), (a, given) if as_tensor else (a,))
    for gradient in found:
        assert gradient.abs().max() <= 1e-9


@pytest.mark.few(0)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
@pytest.mark.parametrize("name", slow_but(("topk",), ("min", "topk", "sum", "matmul")))
def test_many_rows_into_few_points(name, dtype):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(20000, 8, generator=generator, dtype=torch.float64).to(dtype)
    points = torch.randn(3, 8, generator=generator, dtype=torch.float64).to(dtype)
    g = torch.rand(20000, generator=generator, dtype=torch.float64).to(dtype)
    v = torch.tensor([0.5, -1.25, 2.0]).to(dtype)
    points.requires_grad_()
    squares = kl.squared_distance()
    call = {
        "min": lambda: kl.kernel_min(squares, rows, points)[0],
        "topk": lambda: kl.kernel_topk(squares, rows, points, 1)[0][:, 0],
        "sum": lambda: kl.kernel_sum(squares, rows, points),
        "matmul": lambda: kl.kernel_matmul(squares, rows, points, v),
    }[name]
    (found,) = torch.autograd.grad(call(), points, g)
    difference = points.detach().double() - rows.double()[:, None]
    weights = v.double().expand(20000, 3) if name == "matmul" else torch.ones(20000, 3).double()
    if name in ("min", "topk"):
        nearest = (difference**2).sum(-1).argmin(1)
        weights = torch.nn.functional.one_hot(nearest, 3).double()
    terms = 2 * (weights * g.double()[:, None])[..., None] * difference
    hostile.check(found, terms.sum(0), terms.abs().sum(0), where=name, bars=hostile.GRADIENT)


def test_small_gradients_of_a_chosen_point_count_beside_a_large_one():
    """In float32 each of them would vanish in the sum."""
    rows, points = torch.zeros(300, 1), torch.tensor([[0.5], [9.0]], requires_grad=True)
    grad = torch.cat((torch.tensor([2.0**24]), torch.full((299,), 0.75)))
    squares = kl.squared_distance()
    for found in (kl.kernel_min(squares, rows, points), kl.kernel_topk(squares, rows, points, 1)):
        (slope,) = torch.autograd.grad(found[0].flatten(), points, grad)
        assert slope.tolist() == [[float(grad.double().sum().float())], [0.0]]


@pytest.mark.parametrize("size", hostile.SIZES)
@pytest.mark.parametrize("name", ("cdist p=1", "cdist p=1.5", "gaussian", "matern52"))
def test_sizes_around_powers_of_two(name, size):
    for sizes in ({"rows": size}, {"columns": size}, {"features": size}):
        case = hostile.case("normal", **sizes)
        compare(FUNCTIONS[name], case, along=False)
        if name in SQUARES:
            compare(FUNCTIONS[name], case, along=True)


MATRICES = {
    "gaussian": (kl.gaussian(), {"bandwidth": 1.3}),
    "laplace": (kl.laplace_l1(), {"bandwidth": 1.3}),
    "p": (kl.p_distance(), {"p": 2.5}),
    "symmetric": (kl.gaussian(symmetric=True), {"bandwidth": 1.3}),
}


@pytest.mark.parametrize("case", MATRICES)
def test_several_gradients_at_once(case, seed):
    """As of ``torch.autograd.functional.jacobian(vectorize=True)``."""
    descriptor, values = MATRICES[case]
    points = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 6)]
    points = points[: 1 if descriptor.symmetric else 2]
    out = kl.run_kernel(descriptor, *points, **values)
    grads = torch.randn(4, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, points, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, points, grad, retain_graph=True) for grad in grads]
    for ours, theirs in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


REDUCED = {
    "a maximum": lambda x: kl.cdist(x, x.detach() + 1, p=float("inf")),
    "a maximum by its own name": lambda x: kl.run_kernel(
        kl.Pairwise(inner=kl.Power()), x, x.detach() + 1, inner_p=float("inf")
    ),
    "a product": lambda x: kl.kernel_matmul(kl.gaussian(), x, x, x, bandwidth=1.0),
    "a log-sum-exp": lambda x: kl.kernel_logsumexp(kl.l1_distance(), x, x.detach()),
}


@pytest.mark.parametrize("case", REDUCED)
def test_where_several_gradients_are_not_supported_that_is_said(case, seed):
    x = torch.randn(5, 3, requires_grad=True)
    out = REDUCED[case](x)
    with pytest.raises(RuntimeError, match=r"is_grads_batched=True, .* one gradient after"):
        torch.autograd.grad(out, x, torch.randn(4, *out.shape), is_grads_batched=True)


AT_ZERO = {  # descriptors, and the names of their numbers, the exponent first
    "outer exponent": (kl.Pairwise("dot", kl.Identity(), kl.Power()), "outer_p"),
    "power exponential": (kl.dot_product(epilogue=kl.PowerExponential()), "q bandwidth"),
    "custom": (kl.dot_product(epilogue=kl.Custom("scale * v ** q", ("q", "scale"))), "q scale"),
    "laplace": (kl.dot_product(epilogue=kl.Laplace()), "bandwidth"),
    "gaussian": (kl.dot_product(epilogue=kl.Gaussian()), "bandwidth"),
    "cauchy": (kl.dot_product(epilogue=kl.Cauchy()), "bandwidth"),
    "rational": (kl.dot_product(epilogue=kl.RationalQuadratic()), "alpha bandwidth"),
    "power sum": (kl.power_sum(), "p"),
    "power and logarithm": (kl.Pairwise(inner=kl.PowerLog()), "p"),
    "norm": (kl.p_distance(), "p"),
    "sum of exponentials": (kl.exp_power_sum(), "p inner_scale"),
    "laplace_pq": (kl.laplace_pq(), "q p bandwidth"),
    "matern": (kl.matern52(), "bandwidth"),
}


def derivatives_at(descriptor, names, exponent, place):
    """The gradient and the Hessian of one value by its sum, of dot products, and by its numbers."""
    numbers = dict(zip(names, (exponent, 1.3, 0.7), strict=False))
    leaves = [torch.tensor(x, dtype=torch.float64) for x in (place, *numbers.values())]
    is_dot = descriptor.operator == "dot"

    def value(x, *given):
        a, b = (x.view(1, 1), torch.ones_like(x).view(1, 1))
        b = b if is_dot else torch.zeros_like(b)
        return kl.run_kernel(descriptor, a, b, **dict(zip(numbers, given, strict=True))).sum()

    leaves = [leaf.requires_grad_() for leaf in leaves]
    first = torch.autograd.grad(value(*leaves), leaves, create_graph=True)
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    begin = 0 if is_dot else 1  # by points there is a corner, whose slope is 0
    second = [torch.autograd.grad(g, leaves, **options) for g in first[begin:]]
    return torch.stack([torch.stack(row)[begin:] for row in (first, *second)])


@pytest.mark.few(12)
@pytest.mark.parametrize("exponent", (0.5, 1.0, 1.5, 2.0, 2.5, 3.0))
@pytest.mark.parametrize("name", AT_ZERO)
def test_derivatives_at_0_are_their_limits_and_0_where_these_are_infinite(name, exponent):
    descriptor, names = AT_ZERO[name]
    given = descriptor, names.split(), exponent
    found, near, nearer = (derivatives_at(*given, place) for place in (0.0, 1e-60, 1e-90))
    wanted = torch.where((near - nearer).abs() < 1e-6, nearer, 0.0)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
