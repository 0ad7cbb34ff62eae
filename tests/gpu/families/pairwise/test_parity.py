"""What kermac lacks or gets wrong, on the GPU, for whatever computes kernel machines: products on
tensor cores, and then every call."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.runtime.devices import arch_of
from tests.gpu.families.pairwise.cases import points, relative_error
from tests.support.gpus import on_hopper

INF, NAN = math.inf, math.nan
L2, SQUARES, DOT = kl.l2_distance(), kl.squared_distance(), kl.dot_product()
M, N, K = 1700, 1901, 300  # of odd strides, and enough for tensor cores to pay


def squares(a, b):
    """Squared distances in float64, by differences, a few rows at a time."""
    a, b = a.double(), b.double()
    return torch.cat([(rows[:, None] - b).square().sum(-1) for rows in a.split(32)])


@pytest.fixture
def tensor_cores():
    """Where p = 2 and dot products go by them."""
    if not on_hopper():
        pytest.skip("differences compute p = 2 on GPUs other than those of sm_90")


def by_products(descriptor, *tensors, **arguments) -> bool:
    """Whether a call goes by tensor cores."""
    specs = ahead.specs(descriptor, arch_of(0), tensors, arguments)
    return any("pairwise/split" in spec.source for spec in specs)


# p = 2 and dot products by tensor cores.


@pytest.mark.parametrize("scale", (1e-15, 1.0, 1e15))
def test_products_are_as_accurate_as_float32(scale, tensor_cores, seed):
    a, b = points(M, K, scale=scale), points(N, K, scale=scale)
    for descriptor, wanted in (
        (L2, squares(a, b).sqrt()),
        (SQUARES, squares(a, b)),
        (DOT, a.double() @ b.double().mT),
    ):
        assert by_products(descriptor, a, b)
        assert not by_products(descriptor.replace(direct=True), a, b)
        out = torch.full((M, N), NAN, device="cuda")
        assert kl.run_kernel(descriptor, a, b, out=out) is out
        assert relative_error(out, wanted) <= 1e-6, descriptor.describe()


def test_what_is_not_finite_is_what_differences_give(tensor_cores, seed):
    a, b = points(M, K), points(N, K)
    a[3, 5], a[10, 99], a[11], a[12, 3] = NAN, INF, 1e30, 3e38
    b[20, 0], b[21, 1], b[22], b[23] = -INF, NAN, 1e-30, 0
    a[12, 0], b[20, 3] = 1, 2  # the infinity and the product past float32 are of one pair
    for descriptor, wanted in ((SQUARES, squares(a, b)), (DOT, a.double() @ b.double().mT)):
        wanted, out = wanted.float(), kl.run_kernel(descriptor, a, b)
        assert torch.equal(out.isnan(), wanted.isnan()), descriptor.describe()
        assert torch.equal(out.isinf(), wanted.isinf()), descriptor.describe()
        assert relative_error(out[13:, 24:], wanted[13:, 24:]) <= 1e-6


def test_symmetric_products(tensor_cores, seed):
    a = points(M, K)
    assert by_products(SQUARES.replace(symmetric=True), a)
    out = kl.run_kernel(kl.l2_distance(symmetric=True), a)
    assert torch.equal(out, out.mT) and not out.diagonal().any()
    assert relative_error(out, squares(a, a).sqrt()) <= 1e-6
    ridge = kl.run_kernel(kl.gaussian(symmetric=True), a, bandwidth=20.0, regularization=0.5)
    assert torch.equal(ridge, ridge.mT) and (ridge.diagonal() == 1.5).all()


@pytest.mark.parametrize("turned", range(8))
def test_products_in_every_layout_put_the_diagonal_where_it_is(turned, tensor_cores, seed):
    def laid(t, column_major):
        return t.mT.contiguous().mT if column_major else t

    a, b = laid(points(2, M, K), turned & 1), laid(points(N, K), turned & 2)
    memory = laid(torch.full((2, M + 3, N + 5), NAN, device="cuda"), turned & 4)
    out = memory[:, :M, :N]
    bandwidth = torch.tensor([15.0, 0.0, 25.0], device="cuda")[::2]
    options = {"bandwidth": bandwidth, "regularization": 0.5, "row_offset": 7, "col_offset": 2}
    assert by_products(kl.gaussian(), a, b, out=out, **options)
    kl.run_kernel(kl.gaussian(), a, b, out=out, **options)
    widths = bandwidth.double()[:, None, None]
    rows, columns = torch.arange(M, device="cuda")[:, None], torch.arange(N, device="cuda")
    wanted = torch.exp(-torch.stack([squares(x, b) for x in a]) / (2 * widths**2))
    wanted += 0.5 * (rows + 7 == columns + 2)
    assert relative_error(out, wanted) <= 2e-6
    kl.run_kernel(kl.gaussian(), a, b, out=out, accumulate=True, **options)
    assert relative_error(out, 2 * wanted) <= 2e-6
    assert memory.isnan().sum() == memory.numel() - out.numel()


@pytest.mark.parametrize("asked", (None, "fp32", "tf32", "bf16"))
@pytest.mark.parametrize("setting", ("highest", "high", "medium"))
def test_precision_is_an_accuracy(setting, asked, permitted, tensor_cores, seed):
    permitted(setting)
    exact = asked == "fp32" or (asked is None and setting == "highest")
    a, b = points(M, K), points(N, K)
    for descriptor, wanted in ((L2, squares(a, b).sqrt()), (DOT, a.double() @ b.double().mT)):
        error = relative_error(kl.run_kernel(descriptor.replace(precision=asked), a, b), wanted)
        assert error <= (1e-6 if exact else 1e-2)
        direct = kl.run_kernel(descriptor.replace(precision=asked, direct=True), a, b)
        assert relative_error(direct, wanted) <= 1e-6  # which asks for no products


# Every call of kernel machines: shapes of its tensors, the call, and a number that it takes.

CALLS = {
    "cdist": (((20, 5), (30, 5)), lambda t, n: kl.cdist(*t, p=n), 1.3),
    "gaussian": (((20, 5), (30, 5)), lambda t, n: kl.run_kernel(kl.gaussian(), *t, bandwidth=n), 2),
    "kernel_matmul": (
        ((20, 5), (30, 5), (30, 2)),
        lambda t, n: kl.kernel_matmul(kl.gaussian(), *t, bandwidth=n),
        2.0,
    ),
    "many columns": (
        ((20, 5), (30, 5), (30, 70)),
        lambda t, n: kl.kernel_matmul(kl.laplace_l1(), *t, bandwidth=n),
        3.0,
    ),
    "kernel_logsumexp": (
        ((20, 5), (30, 5)),
        lambda t, n: kl.kernel_logsumexp(kl.laplace_l2(), *t, bandwidth=n),
        2.0,
    ),
    "kernel_topk": (
        ((20, 5), (30, 5)),
        lambda t, n: kl.kernel_topk(kl.p_distance(), *t, 3, p=n)[0],
        1.3,
    ),
    "cdist_grad": (
        ((30, 20), (5, 30), (2, 30), (5, 20)),
        lambda t, n: kl.cdist_grad(*t, p=n),
        1.3,
    ),
    "cdist_expadd": (
        ((20, 5), (30, 5)),
        lambda t, n: kl.cdist_expadd(*t, p=1.3, lengthscale=n),
        1.5,
    ),
    "cdist_grad_expadd": (
        ((30, 20), (5, 30), (2, 30), (5, 20)),
        lambda t, n: kl.cdist_grad_expadd(*t, p=1.3, q=n, c0=0.5, scale=-0.4),
        1.5,
    ),
    "agop": (
        ((20, 5), (30, 5), (2, 30)),
        lambda t, n: kl.agop(kl.laplace_l2(), *t, bandwidth=n),
        2.0,
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def close(found, wanted, tolerance=2e-5):
    assert found.shape == wanted.shape
    assert relative_error(found, wanted) <= tolerance


@every_call
def test_numbers_of_every_shape_and_stride_are_a_loop(name, seed):
    shapes, call, number = CALLS[name]
    tensors = [points(3, *shape) for shape in shapes]
    each = torch.tensor([number, number + 0.25, number + 0.5], device="cuda")
    strided = torch.zeros(9, device="cuda")
    strided[::3] = each
    forms = {
        "one": each[:1],
        "no dimension": each[0],
        "each": each,
        "expanded": each[:1].expand(3),
        "strided": strided[::3],
        "float64": each.double(),
        "host": each.cpu(),
    }
    for form, value in forms.items():
        found = call(tensors, value)
        for l, one in enumerate(value.cpu().float().expand(3).tolist()):
            wanted = call([t[l] for t in tensors], one)
            assert relative_error(found[l], wanted) <= 2e-5, (form, l)


@every_call
def test_batches_of_odd_strides_and_shifted_rows(name, seed):
    shapes, call, number = CALLS[name]
    tensors = [points(3, *shape) for shape in shapes]
    wanted = call(tensors, number)
    for kind in ("batch", "rows", "columns"):
        laid = []
        for t in tensors:
            *_, rows, columns = t.shape
            if kind == "columns":
                laid.append(t.mT.contiguous().mT)
                continue
            pitch = columns + 3 * (kind == "rows")
            step = rows * pitch + 1
            memory = torch.full((3 * step + 1,), NAN, device="cuda")
            view = memory.as_strided(t.shape, (step, pitch, 1), 1)
            laid.append(view.copy_(t))
        close(call(laid, number), wanted)


@every_call
def test_batches_of_one_and_expanded_ones_broadcast(name, seed):
    shapes, call, number = CALLS[name]
    tensors = [points(*shape) for shape in shapes]
    wanted = call(tensors, number)
    for place in range(len(tensors)):
        given = [t[None] for t in tensors]
        given[place] = tensors[place].expand(3, -1, -1)
        found = call(given, number)
        for one in found:
            close(one, wanted)


@every_call
def test_autocast_and_inference_mode_change_nothing(name, seed):
    shapes, call, number = CALLS[name]
    tensors = [points(*shape) for shape in shapes]
    wanted = call(tensors, number)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(call(tensors, number), wanted)
    with torch.inference_mode():
        inside = [t.clone() for t in tensors]
        assert torch.equal(call(inside, number), wanted)
    assert torch.equal(call(inside, number), wanted)


@every_call
def test_what_requires_a_gradient_is_recorded_or_refused(name, seed):
    shapes, call, number = CALLS[name]
    for place in range(len(shapes)):
        tensors = [points(*shape) for shape in shapes]
        tensors[place].requires_grad_()
        try:
            assert call(tensors, number).requires_grad
        except RuntimeError as error:
            assert "requires a gradient" in str(error)
        with torch.no_grad():
            assert not call(tensors, number).requires_grad


def test_autocast_leaves_maps_of_features_and_gradients_alone(seed):
    a, b, w = points(20, 5), points(30, 5), points(5, 4)

    def results():
        mapped = kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0, feature_map=w)
        x = a.clone().requires_grad_()
        k = kl.run_kernel(kl.gaussian(), x, b, bandwidth=2.0)
        return mapped, torch.autograd.grad(k.sum(), x)[0]

    wanted = results()
    with torch.autocast("cuda", torch.float16):
        found = results()
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


# Sizes.


def test_nothing_to_compute(seed):
    x, z, c = points(0, 5), points(30, 5), points(2, 30)
    for f in (kl.kernel_sum, kl.kernel_logsumexp):
        assert f(kl.gaussian(), x, z, bandwidth=1.0).shape == (0,)
    assert kl.kernel_topk(kl.l1_distance(), x, z, 3)[0].shape == (0, 3)
    assert not kl.kernel_matmul(kl.gaussian(), z, x, points(0, 2), bandwidth=1.0).any()
    assert (kl.kernel_logsumexp(kl.gaussian(), z, x, bandwidth=1.0) == -INF).all()
    assert (kl.kernel_sum(kl.gaussian(), z[:, :0], z[:, :0], bandwidth=1.0) == 30).all()
    assert not kl.cdist_grad(points(0, 7), points(5, 0), points(2, 0), points(5, 7)).any()
    assert kl.cdist_grad(points(3, 0), points(5, 3), points(2, 3), points(5, 0)).numel() == 0
    assert kl.cdist_grad(points(3, 4), points(0, 3), points(2, 3), points(0, 4)).numel() == 0
    assert not kl.cdist_expadd(z[:, :0], z[:, :0], scale=-1.0).any()
    assert not kl.agop(kl.gaussian(), z, x, points(2, 0), bandwidth=1.0).any()
    with pytest.raises(ValueError, match="an average needs a query"):
        kl.agop(kl.gaussian(), x, z, c, bandwidth=1.0)


@pytest.mark.parametrize("side", ("rows", "columns"))
def test_more_points_than_an_axis_of_blocks_holds(side, seed):
    many, few = points(9_000_001, 1), points(3, 1)
    a, b = (many, few) if side == "rows" else (few, many)
    differences = a.double() - b.double().mT
    v = torch.ones(len(b), device="cuda")
    found = kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=1.0)
    assert relative_error(found, torch.exp(-(differences**2) / 2).sum(1)) <= 2e-6
    weights = torch.ones(len(b), len(a), device="cuda")
    slopes = kl.cdist_grad(weights, b.mT, v[None], a.mT, p=1)  # (1, 1, M)
    assert torch.equal(slopes.view(-1).double(), differences.sign().sum(1))
    nearest = kl.kernel_argmin(kl.l1_distance(), a, b)
    assert torch.equal(nearest, (a - b.mT).abs().argmin(1))


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("many columns", "agop")])
def test_more_batches_than_blocks_of_a_grid(name, seed):
    shapes, call, number = CALLS[name]
    count = 70_001
    tensors = [points(count, *(min(size, 3) for size in shape)) for shape in shapes]
    found = call(tensors, number)
    for l in (0, 65_535, 65_536, count - 1):
        close(found[l], call([t[l] for t in tensors], number))
