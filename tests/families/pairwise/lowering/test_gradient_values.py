"""Pair gradients, whose kernel threads of the host run from the call on, against float64."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import matrix
from kernlib.families.pairwise.gradients import backward, norms, primitive
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.runtime.plan import forget_plans
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.emulation.gpus import gpu, host

pytestmark = pytest.mark.emulated
BOUND = {torch.float32: 3e-6, torch.float64: 1e-13}


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    forget_plans()
    folder = kernels_of(tmp_path_factory)
    return emulated.install(monkeypatch, folder, matrix, primitive)


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slopes_of(a, b, g, p):
    """The gradients of a sum of norms by both sides, and the sums of their absolute terms."""
    a, b, g = a.double(), b.double(), g.double()
    v = a[:, None] - b
    n = kl.cdist(a, b, p=p)
    terms = g[..., None] * v.sign() * torch.where(v == 0, 0.0, (v.abs() / n[..., None]) ** (p - 1))
    return [(sign * terms.sum(d), terms.abs().sum(d)) for sign, d in ((1, 1), (-1, 0))]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(6, 5, 3), (70, 33, 130), (64, 40, 64)])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e4, 1e30])
@pytest.mark.parametrize("p", [0.7, 1.5, 2.5, 3, 4, 7.3, 10, "device"])
def test_slopes_of_norms_at_any_magnitude(p, scale, m, n, k, dtype, gpus):
    device = p == "device"
    p = 5.6 if device else p
    a, b = (drawn(*s, seed=i).mul(scale).to(dtype) for i, s in enumerate(((m, k), (n, k))))
    b[: min(m, n) // 3] = a[: min(m, n) // 3]
    g = drawn(m, n, seed=2, dtype=dtype)
    made = Sums(kl.power_sum(), {"p": gpu(torch.tensor(p, dtype=dtype)) if device else p})
    x, z, w = map(gpu, (a, b, g))
    given, scales = norms.shared(made.p, w, norms.of(made, x, z))
    turned = None if scales is None else scales.mT
    found = (
        backward.points_gradient(made, x, z, given, True, scales),
        backward.points_gradient(made, z, x, given.mT, False, turned),
    )
    for one, (wanted, size) in zip(found, slopes_of(a, b, g, p), strict=True):
        assert ((host(one).double() - wanted).abs() <= BOUND[dtype] * size).all()
