"""Potentials of columns in the kernels of log-sum-exps, which threads of the host run."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.reductions import kernels
from tests.families.pairwise.cases import points
from tests.support.emulation.gpus import gpu, host

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("gpus")]

LOG = kl.squared_distance(epilogue=kl.Custom("-s * v", ("s",)))


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """A block has 128 points, so that rows of more have several parts."""
    cut = kernels.lowering.Cut(1, 1, 128)
    monkeypatch.setattr(kernels.lowering, "small_cut", lambda *_, **__: cut)
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("k", "dtype", "of_potentials"),
    [
        (3, torch.float32, torch.float32),
        (3, torch.float16, torch.float32),
        (3, torch.bfloat16, torch.bfloat16),
        (3, torch.float64, torch.float64),
        (20, torch.float32, torch.float32),
        (20, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_potentials_reach_the_kernels(k, dtype, of_potentials, gpus):
    a, b = points(7, k).to(dtype), points(301, k, seed=1).to(dtype)
    f, g = 9 * points(7, 1, seed=2)[:, 0], 9 * points(301, 2, seed=3)[:, 1]
    g[5], g[17], g[200] = -1e4, -torch.inf, 1e3
    f, g = f.to(of_potentials), g.to(of_potentials)
    matrix = kl.run_kernel(LOG, a.double(), b.double(), s=0.3)
    found = kl.kernel_logsumexp(
        LOG, gpu(a), gpu(b), s=0.3, row_potential=gpu(f), col_potential=gpu(g)
    )
    assert found.dtype == (of_potentials if dtype != torch.float64 else dtype)
    assert any("ShiftedLogSumExp" in spec.description for spec in gpus.specs)
    wanted = f.double() + (matrix + g.double()).logsumexp(1)
    bound = 4e-3 if of_potentials == torch.bfloat16 else 1e-6
    torch.testing.assert_close(host(found).double(), wanted, rtol=bound, atol=bound)
    left_out = kl.kernel_logsumexp(
        LOG, gpu(a), gpu(b), s=0.3, col_potential=gpu(torch.full_like(g, -torch.inf))
    )
    assert host(left_out).eq(-torch.inf).all()


@pytest.mark.parametrize(
    ("a", "b", "g"), [((2, 5, 3), (130, 3), (2, 130)), ((5, 3), (130, 3), (3, 130))]
)
def test_batches_of_potentials(a, b, g, gpus):
    a, b, g = points(*a), points(*b, seed=1), points(*g, seed=2)
    found = kl.kernel_logsumexp(LOG, gpu(a), gpu(b), s=0.3, col_potential=gpu(g))
    matrix = kl.run_kernel(LOG, a, b, s=0.3)
    torch.testing.assert_close(host(found), (matrix + g[:, None]).logsumexp(-1))
    assert gpus.specs


STEPS = torch.linspace(-80, 120, 137)
VALUES = {
    "rising": STEPS,
    "falling": STEPS.flip(0),
    "slowly rising": STEPS / 20,
    "far apart": 1e4 * STEPS.sin(),
    "the largest": torch.full((137,), -3e38).index_fill(0, torch.tensor([71]), 3e38),
    "the least": torch.full((137,), -3e38),
    "beside -inf": STEPS.masked_fill(STEPS < 30, -torch.inf),
    "inf": STEPS.masked_fill(STEPS > 119, torch.inf),
    "NaN": STEPS.masked_fill(STEPS > 119, torch.nan),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_come_in_groups(name):
    """Whose largest is that of groups before."""
    column = VALUES[name]
    found = kl.kernel_logsumexp(kl.dot_product(), gpu(torch.ones(5, 1)), gpu(column[:, None]))
    wanted = column.double().logsumexp(0).float().expand(5)
    torch.testing.assert_close(host(found), wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
