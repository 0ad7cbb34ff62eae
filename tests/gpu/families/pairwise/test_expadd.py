"""Sums of exponentials, stages of logarithms and gradients of powers of sums on the GPU, against
float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.compat import kermac
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import exp_power_sum
from kernlib.families.pairwise.functions.expadd import cdist_expadd, cdist_grad_expadd
from tests.gpu.families.pairwise.cases import check, points, relative_error
from tests.gpu.watched import heard, nothing_waits

SUMS, LOGS = exp_power_sum(), kl.Pairwise(inner=stages.PowerLog())
SHAPES = ((1, 1, 1), (33, 65, 7), (129, 127, 8), (200, 131, 19), (128, 256, 64), (257, 133, 1023))
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("p", (0, 0.3, 0.7, 1, 1.3, 2, 3))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_exponentials(p, shape, seed):
    m, n, k = shape
    a, b = points(m, k), points(n, k)
    a[0] = b[-1]
    check(SUMS, a, b, p=p, inner_scale=-0.7, tolerance=5e-6)


@pytest.mark.parametrize("k", (0, 1, 3, 15, 16, 17, 127, 128, 129, 130, 144, 1025))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_features_past_the_last_one_count_nothing(k, dtype, seed):
    a, b = points(70, k, dtype=dtype), points(130, k, dtype=dtype)
    for p in (1, 2, 1.3):
        out = torch.full((70, 130), math.nan, dtype=torch.promote_types(dtype, torch.float32))
        check(SUMS, a, b, p=p, inner_scale=-0.7, out=out.cuda(), tolerance=TOLERANCE[dtype])
    for transposed in (a.mT.contiguous().mT, torch.stack((a, a), -1)[..., 0]):
        check(SUMS, transposed, b, p=1, inner_scale=-0.7, tolerance=max(TOLERANCE[dtype], 5e-6))


def test_equal_points_count_every_feature(seed):
    for k in (5, 130, 1000):
        a = points(300, k)
        found = kl.run_kernel(exp_power_sum(symmetric=True), a, p=1.3, inner_scale=-2.0)
        assert torch.equal(found, found.mT)
        assert (found.diagonal() == k).all()


@pytest.mark.parametrize("p", (0.0, 0.5, 1.0, 1.7, 2.0))
def test_numbers_on_the_device_equal_those_of_the_host(p, seed):
    a, b = points(3, 130, 77), points(67, 77)
    a[1, 3] = b[5]
    exponent = torch.tensor(p, device="cuda")
    scales = torch.tensor((-1.0, 9.0, -0.3, 9.0, -0.1), device="cuda")[::2]
    found = cdist_expadd(a, b, p=exponent, scale=scales)
    for l, scale in enumerate((-1.0, -0.3, -0.1)):
        wanted = cdist_expadd(a[l].double(), b.double(), p=p, scale=scale)
        assert relative_error(found[l], wanted) <= 5e-6
    length = torch.tensor((0.5, 1.0, 2.0), device="cuda")
    found = cdist_expadd(a, b, p=exponent, lengthscale=length)
    wanted = cdist_expadd(a.double(), b.double(), p=p, scale=-(length.double() ** -p))
    assert relative_error(found, wanted) <= 1e-5


@pytest.mark.parametrize("p", (0, 0.5, 1, 1.3, 2))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_powers_times_logarithms(p, dtype, shape, seed):
    m, n, k = shape
    a, b = points(m, k, dtype=dtype) + 3, points(n, k, dtype=dtype)
    a[1] = b[2]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    out = check(LOGS, a, b, p=p, tolerance=tolerance)
    assert out[1, 2] == 0
    exponent = torch.tensor(p, device="cuda", dtype=dtype)
    on_device = kl.run_kernel(LOGS, a, b, p=exponent)
    assert relative_error(on_device, out) <= tolerance
    a[3, 0] = math.nan
    assert kl.run_kernel(LOGS, a, b, p=p)[3].isnan().all()


@pytest.mark.parametrize("stage", (stages.ExpPower, stages.PowerLog))
def test_dot_products_pass_the_stages_too(stage, seed):
    arguments = {"inner_scale": -0.5} if stage is stages.ExpPower else {}
    check(kl.Pairwise("dot", stage()), points(90, 33), points(70, 33), p=1.3,
          tolerance=1e-5, **arguments)  # fmt: skip


# Gradients.


def gradient(a, b, c, d, p, q, c0, scale):
    """In float64, and the sums of the terms' magnitudes."""
    a, b, c, d = (t.double() for t in (a, b, c, d))
    v = d.unsqueeze(-2) - b.unsqueeze(-1)  # (N, K, M)
    s = torch.exp(scale * v.abs() ** p).sum(0)
    slope = torch.where(v == 0, 0.0, v.sign() * v.abs() ** (p - 1)) * p * scale
    slope = slope * torch.exp(scale * v.abs() ** p)
    weights = a * q * (c0 + s) ** (q - 1)
    wanted = torch.einsum("ok,km,nkm->onm", c, weights, slope)
    return wanted, torch.einsum("ok,km,nkm->onm", c.abs(), weights.abs(), slope.abs())


@pytest.mark.parametrize("p", (0.7, 1, 1.3, 2))
@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (70, 33, 5, 130), (129, 100, 17, 65)), ids=str)
@pytest.mark.parametrize("q", (1.0, 0.7, 2.0))
def test_gradients_of_powers_of_sums(p, sizes, q, seed):
    k, n, o, m = sizes
    a, b, c, d = points(k, m), points(n, k), points(o, k), points(n, m)
    d[:, 0] = b[:, 0]
    wanted, size = gradient(a, b, c, d, p, q, 0.3, -0.4)
    out = torch.full((o, n, m), math.nan, device="cuda")
    options = {"p": p, "q": q, "c0": 0.3, "scale": -0.4}
    assert cdist_grad_expadd(a, b, c, d, out=out, **options) is out
    assert ((out - wanted).abs() <= 1e-4 * size + 1e-30).all()
    s = cdist_expadd(b.mT, d.mT, p=p, scale=-0.4)
    again = cdist_grad_expadd(a, b, c, d, s_km=s, **options)
    assert ((again - wanted).abs() <= 1e-4 * size + 1e-30).all()


def test_gradients_by_numbers_on_the_device_wait_for_nothing(seed):
    a, b, c, d = points(70, 130), points(33, 70), points(5, 70), points(2, 33, 130)
    given = {"p": 1.3, "q": 0.7, "c0": 0.3, "scale": -0.4}
    wanted = cdist_grad_expadd(a, b, c, d, **given)
    placed = {name: torch.tensor(x, device="cuda") for name, x in given.items()}
    cdist_grad_expadd(a, b, c, d, **placed)
    with nothing_waits():
        found = cdist_grad_expadd(a, b, c, d, **placed)
    assert relative_error(found, wanted) <= 1e-5


# kermac's names.


@pytest.mark.parametrize("number", range(8))
def test_kermacs_layouts_and_regularization(number, seed):
    def laid(t, column_major):
        return t.mT.contiguous().mT if column_major else t

    a, b = laid(points(2, 130, 33), number & 1), laid(points(2, 70, 33), number & 2)
    out = laid(torch.full((2, 130, 70), math.nan, device="cuda"), number & 4)
    options = {"regularization": 0.5, "regularization_offset_x": 2}
    kermac.run_kernel(kermac.laplace_l1, a, b, out, bandwidth=9.0, epsilon=0.0, **options)
    wanted = torch.exp(-torch.cdist(a.double(), b.double(), p=1) / 9)
    rows, columns = torch.arange(130, device="cuda")[:, None], torch.arange(70, device="cuda")
    wanted += 0.5 * (rows == columns + 2)
    assert relative_error(out, wanted) <= 2e-6


def test_kermacs_descriptors_are_there_once_they_were_compiled_ahead(seed):
    descriptors = [kermac.l1_norm, kermac.laplace_l2]
    kermac.pre_compile_descriptors(0, descriptors)
    with heard() as seen:
        kermac.run_kernel(kermac.l1_norm, points(1000, 64), points(1200, 64))
        kermac.run_kernel(kermac.laplace_l2, points(77, 65), points(55, 65), bandwidth=2.0)
    assert not [event for event in seen if event.name == "compile"]


def test_kermacs_timer_measures_the_device():
    timer = kermac.CudaTimer()
    timer.start()
    torch.cuda._sleep(2_000_000)
    assert timer.stop() > 0.3
