"""Reductions and gradients whose rows several threads of a block share, run by threads of the host:
all cuts of a problem against float64."""

import math
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.reductions import fused
from kernlib.families.pairwise.reductions.arguments import request_of, shape_of
from tests.support.emulation.gpus import gpu, host
from tests.support.speeds import slow_but

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("gpus")]

GAUSSIAN = kl.gaussian()
# Rows of a thread, partners, and points of a block.
CUTS = [(1, 32, 4096), (1, 32, 64), (2, 32, 4096), (2, 8, 4096), (2, 8, 32)]
CUT = pytest.mark.parametrize("cut", slow_but(((2, 8, 32), (1, 32, 4096)), CUTS), ids=str)


@contextmanager
def shared(gpus, cut):
    """Launches have this cut, and there is one at least."""
    given, words = reduce.Cut(*cut), f"rows={cut[0]} partners={cut[1]}"
    with (
        mock.patch.object(reduce, "small_cut", lambda *_, **__: given),
        mock.patch.object(reduce.Work, "is_large", lambda *_: False),
    ):
        yield
    assert gpus.specs and all(words in spec.description for spec in gpus.specs)


def points(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def gaussian(a, b, width):
    return torch.exp(-torch.cdist(a.double(), b.double()).square() / (2 * width**2))


@pytest.mark.few(1)
@CUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 4])
def test_products(columns, dtype, cut, gpus, seed):
    for m, n in ((1, 1), (7, 31), (33, 300), (70, 130)):
        a, b, v = (points(2, count, 3, dtype=dtype) for count in (m, n, n))
        v = points(2, n, columns, dtype=dtype)
        with shared(gpus, cut):
            found = kl.kernel_matmul(
                GAUSSIAN, *map(gpu, (a, b, v)), bandwidth=1.3, regularization=0.25
            )
        matrix = gaussian(a, b, 1.3)
        matrix.diagonal(dim1=1, dim2=2).add_(0.25)
        error = (host(found).double() - matrix @ v.double()).abs()
        bound = 1e-6 if dtype == torch.float32 else 1e-14
        assert (error <= bound * (matrix @ v.double().abs())).all(), (m, n)


@CUT
def test_log_sums_and_places(cut, gpus, seed):
    descriptor = kl.l2_distance()
    for m, n in ((1, 1), (9, 300), (40, 33)):
        a, b = points(m, 4), points(n, 4)
        half = n // 2
        b[half : 2 * half] = b[:half]  # each twice: the first one is found
        distances = torch.cdist(a.double(), b.double())
        with shared(gpus, cut):
            found = kl.kernel_logsumexp(descriptor, gpu(a), gpu(b))
            values, places = kl.kernel_min(descriptor, gpu(a), gpu(b))
        torch.testing.assert_close(host(found).double(), distances.logsumexp(1), rtol=1e-6, atol=0)
        wanted = distances.min(1)
        torch.testing.assert_close(host(values).double(), wanted.values, rtol=1e-6, atol=0)
        near = distances.gather(1, host(places)[:, None])[:, 0] - wanted.values
        assert (near <= 1e-6).all()
        assert ((host(places) < half) | (host(places) == 2 * half)).all()


@CUT
def test_a_row_of_nothing_but_nan_or_infinities(cut, gpus):
    a, b = torch.zeros(3, 2), torch.zeros(100, 2)
    a[0, 0], a[1, 1] = math.nan, math.inf
    with shared(gpus, cut):
        values, places = kl.kernel_min(kl.l1_distance(), gpu(a), gpu(b))
        found = kl.kernel_logsumexp(kl.l1_distance(), gpu(a), gpu(b))
    assert host(values)[0].isnan() and host(values).tolist()[1:] == [math.inf, 0.0]
    assert host(places).tolist() == [0, 0, 0]
    assert host(found)[0].isnan() and host(found)[1] == math.inf
    assert host(found)[2].item() == pytest.approx(math.log(100), rel=1e-6)


@CUT
def test_norms_that_leave_float32(cut, gpus, seed):
    a, b = points(20, 3) * 1e25, points(90, 3) * 1e25
    with shared(gpus, cut):
        found = kl.kernel_sum(kl.p_distance(), gpu(a), gpu(b), p=3.0)
    wanted = torch.cdist(a.double(), b.double(), p=3.0).sum(1)
    torch.testing.assert_close(host(found).double(), wanted, rtol=2e-6, atol=0)


KINDS = {
    "gaussian": (GAUSSIAN, {"bandwidth": torch.tensor(1.5)}),
    "laplace": (kl.laplace_l1(), {"bandwidth": torch.tensor(2.5)}),
}
ROLES = {"both": ("a", "b"), "first": ("a",), "second": ("b",)}


@pytest.mark.few(1)
@CUT
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, role, cut, gpus, seed):
    """By points, v and the bandwidth."""
    descriptor, numbers = KINDS[kind]
    m, n = (45, 45) if role == "both" else (45, 70)
    a = points(m, 3)
    b = a if role == "both" else points(n, 3)
    v, g = points(n, 2), points(1, m, 2)
    wanted = [*ROLES[role], "v", "bandwidth"]
    given = {name: gpu(value) for name, value in numbers.items()}
    rows = gpu(a)
    lines = rows if role == "both" else gpu(b)
    request = request_of(descriptor, rows, lines, gpu(v), 0, 0, given)
    with shared(gpus, cut):
        found = fused.gradients(request, shape_of(request), wanted, gpu(g), role == "both")
    exact = exactly(kind, role, a, b, v, g[0], numbers["bandwidth"])
    for name, value in found.items():
        error = (host(value).double().reshape(exact[name].shape) - exact[name]).abs()
        assert error.max() <= 4e-6 * max(1.0, exact[name].abs().max()), name
    assert set(found) == {*wanted} - ({"b"} if role == "both" else set())


def exactly(kind, role, a, b, v, g, bandwidth) -> dict:
    """The gradients by automatic differentiation in float64; of one x for a and b those by x."""
    a, v, g = (t.double().requires_grad_() for t in (a, v, g))
    b = a if role == "both" else b.double().requires_grad_()
    width = bandwidth.double().requires_grad_()
    difference = a[:, None] - b
    if kind == "gaussian":
        matrix = torch.exp(-difference.square().sum(-1) / (2 * width**2))
    else:
        matrix = torch.exp(-difference.abs().sum(-1) / width)
    (g.detach() * (matrix @ v)).sum().backward()
    return {"a": a.grad, "b": b.grad, "v": v.grad, "bandwidth": width.grad}
