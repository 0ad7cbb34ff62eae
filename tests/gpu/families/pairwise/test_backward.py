"""Gradients of products and sums with a kernel matrix on the GPU, term by term in float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.reductions import fused
from kernlib.runtime import rehearsal
from tests.gpu.families.pairwise.cases import points
from tests.gpu.families.pairwise.trained import (
    PARTIAL_BYTES,
    assert_same_bits,
    beside_float64,
    captured,
    gradients_of,
    leaves,
    peak_of_gradients,
)

GAUSSIAN = kl.gaussian()
PQ = {"bandwidth": 3.0, "p": 1.2, "q": 0.9}
# Descriptor, hyperparameters, those of them with gradients.
CASES = {
    "gaussian": (GAUSSIAN, {"bandwidth": 2.0}, ["bandwidth"]),
    "laplace l1": (kl.laplace_l1(), {"bandwidth": 3.0}, ["bandwidth"]),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 2.0}, ["bandwidth"]),
    "matern32": (kl.matern32(), {"bandwidth": 2.0}, ["bandwidth"]),
    "matern52": (kl.matern52(), {"bandwidth": 2.0}, ["bandwidth"]),
    "cauchy": (kl.cauchy(), {"bandwidth": 2.0}, ["bandwidth"]),
    "rational quadratic": (
        kl.rational_quadratic(), {"bandwidth": 2.0, "alpha": 1.5}, ["bandwidth", "alpha"],
    ),
    "pq": (kl.laplace_pq(), PQ, ["bandwidth", "q"]),
    "l1": (kl.l1_distance(), {}, []),
    "l2": (kl.l2_distance(), {}, []),
    "norm": (kl.p_distance(), {"p": 3.0}, []),
    "powers": (kl.power_sum(), {"p": 2.3}, []),
    "flat powers": (kl.power_sum(), {"p": 0.7}, []),
    "expadd": (kl.exp_power_sum(), {"p": 1.4, "inner_scale": -0.5}, []),
    "dot": (kl.dot_product(epilogue=kl.Custom("tanh(s * v)", ("s",))), {"s": 0.3}, ["s"]),
    "custom": (
        kl.squared_distance(
            epilogue=(kl.Custom("s * log(1 + t * v)", ("s", "t")), kl.Custom("v / (v + 1)"))
        ),
        {"s": 0.7, "t": 0.3}, ["s", "t"],
    ),
    "signed": (
        kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("tanh(v / s)", ("s",))),
        {"s": 3.0}, ["s"],
    ),
    "regularized": (
        GAUSSIAN, {"bandwidth": 2.0, "regularization": 0.7}, ["bandwidth", "regularization"],
    ),
    "epsilon": (kl.laplace_l1(), {"bandwidth": 3.0, "epsilon": 2.5}, ["bandwidth"]),
}  # fmt: skip
BOUND = 3e-6  # of the sum of absolute terms


@pytest.fixture
def taken(monkeypatch):
    """Whether the kernel computed the gradients of each call."""
    seen, known = [], fused.gradients

    def watched(*arguments):
        found = known(*arguments)
        if rehearsal.current() is None:  # nor for kernels that are compiled early
            seen.append(found is not None)
        return found

    monkeypatch.setattr(fused, "gradients", watched)
    return seen


def terms(descriptor, a, b, worth, values, wanted):
    """What each pair adds to the gradients by a and b, (M, N, K), and by the ``wanted`` values,
    (M, N), in float64: each pair is a call of one point with one."""
    (m, k), n = a.shape, b.shape[0]
    left, right = (
        t.detach().double().expand(m, n, k).reshape(m * n, 1, k).requires_grad_()
        for t in (a[:, None], b[None])
    )
    numbers = {
        name: torch.full((m * n,), float(value), dtype=torch.float64, device=a.device,
                         requires_grad=name in wanted)
        if name in wanted else value
        for name, value in values.items() if name != "regularization"
    }  # fmt: skip
    matrix = kl.run_kernel(descriptor, left, right, **numbers)
    inputs = [left, right, *(numbers[name] for name in wanted if name in numbers)]
    along = worth.double().reshape(-1, 1, 1)
    to_a, to_b, *others = torch.autograd.grad(matrix, inputs, along)
    made = {"a": to_a.view(m, n, k), "b": to_b.view(m, n, k)}
    made |= dict(zip([n for n in wanted if n in numbers], others, strict=True))
    return matrix.detach().view(m, n), {name: t.view(m, n, *t.shape[3:]) if t.dim() == 1 else t
                                        for name, t in made.items()}  # fmt: skip


def check(found, wanted, whole, bound=BOUND):
    """That a gradient is ``wanted`` up to a share of the sum of absolute terms."""
    error = (found.double() - wanted).abs()
    assert not error.isnan().any()
    assert (error <= bound * whole + 1e-30).all(), (error / whole).max().item()


def compare(descriptor, values, wanted, a, b, v, bound=BOUND):
    """Gradients of a call beside their terms; ``b`` is None for those of one x, v for a sum."""
    leaves = {"a": a, **({} if b is None else {"b": b}), **({} if v is None else {"v": v})}
    numbers = {n: torch.tensor(values[n], device="cuda") for n in wanted}
    leaves |= numbers
    for leaf in leaves.values():
        leaf.requires_grad_()
    second = a if b is None else b
    call = kl.kernel_sum if v is None else kl.kernel_matmul
    rest = () if v is None else (v,)
    out = call(descriptor, a, second, *rest, **(values | numbers))
    g = points(*out.shape)
    found = dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], g), strict=True))
    given, weights = g.double(), None if v is None else v.detach().double()
    worth = given[:, None].expand(-1, len(second)) if v is None else given @ weights.mT
    matrix, each = terms(descriptor, a, second, worth, values, wanted)
    if "regularization" in values:
        matrix += values["regularization"] * torch.eye(*matrix.shape, device="cuda")
        each["regularization"] = worth * torch.eye(*matrix.shape, device="cuda")
    if v is not None:
        check(found.pop("v"), matrix.mT @ given, matrix.abs().mT @ given.abs(), bound)
    if b is None:
        to_a, to_b = each.pop("a"), each.pop("b")
        check(found.pop("a"), to_a.sum(1) + to_b.sum(0), to_a.abs().sum(1) + to_b.abs().sum(0),
              bound)  # fmt: skip
    for name, gradient in found.items():
        dims = {"a": 1, "b": 0}.get(name, (0, 1))
        check(gradient, each[name].sum(dims), each[name].abs().sum(dims), bound)


SIZES = [(101, 237, 3, 1), (67, 150, 7, 3), (60, 45, 16, 2), (33, 130, 12, 6)]


@pytest.mark.parametrize(("m", "n", "k", "columns"), SIZES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", ["whole"], indirect=True)
def test_gradients_of_two_sets_of_points(name, m, n, k, columns, blocks, taken, seed):
    descriptor, values, wanted = CASES[name]
    a, b = points(m, k), points(n, k)
    b[5] = a[3]
    b[7, 0] = a[4, 0]
    compare(descriptor, values, wanted, a, b, points(n, columns))
    assert taken == [True]


@pytest.mark.parametrize(
    "n, k, columns, blocks",
    [(131, 3, 1, "whole"), (131, 3, 1, "fitted"), (77, 10, 4, "fitted"), (50, 16, 5, "fitted")],
    indirect=["blocks"],
)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_one_x(name, n, k, columns, blocks, taken, seed):
    descriptor, values, wanted = CASES[name]
    compare(descriptor, values, wanted, points(n, k), None, points(n, columns))
    assert taken == [True]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["gaussian", "laplace l1", "custom", "dot"])
def test_gradients_of_sums(name, shared, taken, seed):
    descriptor, values, wanted = CASES[name]
    compare(descriptor, values, wanted, points(99, 4), None if shared else points(140, 4), None)
    assert taken == [True]


@pytest.mark.parametrize("name", ["gaussian", "laplace l1", "laplace l2", "l1"])
def test_equal_coordinates_add_nothing(name, taken, seed):
    """Integers, of which most pairs share some: the sign of 0 is 0."""
    descriptor, values, wanted = CASES[name]
    x = torch.randint(0, 3, (120, 4), device="cuda").float()
    compare(descriptor, values, wanted, x, None, points(120, 1))
    same = torch.ones(50, 3, device="cuda", requires_grad=True)
    out = kl.kernel_matmul(descriptor, same, same, points(50, 1), **values)
    assert torch.equal(*torch.autograd.grad(out.sum(), same), torch.zeros_like(same))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_summed_in_float32(dtype, taken, seed):
    a, b, v = points(40, 3).to(dtype), points(20_000, 3).to(dtype), points(20_000, 1).to(dtype)
    inputs = [t.requires_grad_() for t in (a, b, v)]
    found = torch.autograd.grad(kl.kernel_matmul(GAUSSIAN, *inputs, bandwidth=2.0).sum(), inputs)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(kl.kernel_matmul(GAUSSIAN, *wide, bandwidth=2.0).sum(), wide)
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=2 * torch.finfo(dtype).eps, atol=1e-2)
    assert taken[0]


def test_batches_and_strides(taken, seed):
    a, b = points(3, 5, 90).mT, points(70, 10)[:, ::2]
    v, bandwidth = points(3, 70, 4)[..., ::2], torch.tensor([1.0, 2.0, 3.0], device="cuda")
    named = {"a": a, "b": b, "v": v, "bandwidth": bandwidth}
    for x, y in beside_float64(named, points(3, 90, 2)):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
    assert taken[0]


@pytest.mark.parametrize("offsets", [(9, 2), (2, 9), (0, 500)])
def test_a_diagonal_elsewhere(offsets, taken, seed):
    values = {"bandwidth": 2.0, "row_offset": offsets[0], "col_offset": offsets[1]}
    named = {"a": points(40, 3), "b": points(50, 3), "v": points(50, 2)}
    named["regularization"] = torch.tensor(0.7, device="cuda")
    for x, y in beside_float64(named, points(40, 2), **values):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gaussian", "laplace l1", "l1", "matern32"])
def test_a_nan_reaches_what_it_touches(name, seed):
    descriptor, values, _ = CASES[name]
    a, b, v = points(60, 3), points(70, 3), points(70, 1)
    b[11, 1] = math.nan
    a.requires_grad_()
    b.requires_grad_()
    out = kl.kernel_matmul(descriptor, a, b, v, **values)
    to_a, to_b = torch.autograd.grad(out, (a, b), torch.ones_like(out))
    assert to_a[:, 1].isnan().all() and to_b[11, 1].isnan()
    kept = torch.arange(70, device="cuda") != 11
    assert not to_b[kept].isnan().any()


@pytest.mark.parametrize("name", ["gaussian", "laplace l1"])
def test_a_nan_in_the_gradient_reaches_all_of_a_row(name, seed):
    descriptor, values, _ = CASES[name]
    a, b, v = points(60, 3), points(70, 3), points(70, 1)
    a[:, 2] = b[:, 2] = 1.0  # whose differences are 0
    a.requires_grad_()
    g = torch.ones(60, 1, device="cuda")
    g[7] = math.nan
    (found,) = torch.autograd.grad(kl.kernel_matmul(descriptor, a, b, v, **values), a, g)
    assert found[7].isnan().all() and found.isnan().sum() == 3


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_points_and_bandwidth_far_from_one(scale, taken, seed):
    named = {"a": scale * points(40, 3), "b": scale * points(40, 3), "v": points(40, 1)}
    for x, y in beside_float64(named, points(40, 1), ("a", "b"), bandwidth=scale):
        torch.testing.assert_close(x.double() * scale, y * scale, rtol=1e-4, atol=1e-5)
    assert taken[0]


def test_a_tiny_bandwidth_on_the_device_makes_no_nan(taken, seed):
    a, b, v = points(40, 3).requires_grad_(), points(50, 3), points(50, 1)
    bandwidth = torch.tensor(1e-25, device="cuda", requires_grad=True)
    out = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    for found in torch.autograd.grad(out.sum(), (a, bandwidth)):
        assert torch.equal(found, torch.zeros_like(found))


def test_few_rows_of_many_lines_and_equal_terms(taken, seed):
    """20000 terms of one size and sign a row: the rounding of chains shows."""
    a = torch.zeros(3, 2, device="cuda", requires_grad=True)
    b = torch.ones(20_000, 2, device="cuda")
    v = torch.full((20_000, 1), 0.1, device="cuda")
    out = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=2.0)
    (found,) = torch.autograd.grad(out, a, torch.ones_like(out))
    wanted = 20_000 * v[0, 0].double() * math.exp(-0.25) / 4
    assert (found.double() / wanted - 1).abs().max() <= BOUND


def test_the_same_bits_each_time(taken, seed):
    given = leaves(3000, 3, 2.0)
    assert_same_bits(lambda: gradients_of(*given))


def test_gradients_wait_for_nothing_and_are_captured(taken, seed):
    given = *_, bandwidth = leaves(500, 3, 2.0)
    graph, kept = captured(lambda: gradients_of(*given))
    with torch.no_grad():
        bandwidth.fill_(1.0)
    graph.replay()
    for s, t in zip(kept, gradients_of(*given), strict=True):
        assert torch.equal(s, t)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_grows_with_the_points_alone(shared, taken, seed):
    count = 60_000  # whose matrix takes 14.4 GB
    assert peak_of_gradients(count, 3, 2.0, shared) <= PARTIAL_BYTES + 32 * 4 * count
    assert peak_of_gradients(4000, 3, 2.0, shared) <= 32 << 20
    assert all(taken)
