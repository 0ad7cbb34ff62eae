"""Reductions in float32 by kernels that threads of the host run: passes over columns, parts of rows
that are put together, batches, and plans that are kept."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.reductions import kernels
from tests.families.pairwise.cases import points
from tests.support.emulation.gpus import gpu, host

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("gpus")]

GAUSSIAN = kl.gaussian()


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """A block has 128 points, so that rows of more have several parts; columns take passes."""
    cut = kernels.lowering.Cut(1, 1, 128)
    monkeypatch.setattr(kernels.lowering, "small_cut", lambda *_, **__: cut)
    monkeypatch.setattr(kernels.lowering, "product_pays", lambda *call: False)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("k", "columns"), [(3, 1), (3, 3), (3, 17), (3, 40), (20, 1), (20, 3), (20, 16)]
)
def test_products_of_any_number_of_columns(k, columns, gpus):
    a, b, v = points(30, k), points(300, k, seed=1), points(300, 2 * columns, seed=2)[:, ::2]
    found = kl.kernel_matmul(GAUSSIAN, *map(gpu, (a, b, v)), bandwidth=4.0)
    wanted = kl.run_kernel(GAUSSIAN, a, b, bandwidth=4.0) @ v
    torch.testing.assert_close(host(found), wanted, rtol=1e-4, atol=1e-4)
    assert len(gpus.specs) == -(-columns // 16)


BATCHES = [
    ((3, 30, 5), (400, 5), (400, 2)),
    ((3, 30, 5), (3, 400, 5), (3, 400, 2)),
    ((30, 5), (400, 5), (3, 400, 2)),
    ((30, 5), (3, 400, 5), (1, 400, 2)),
]


@pytest.mark.parametrize(("a", "b", "v"), BATCHES, ids=str)
def test_batches(a, b, v, gpus):
    a, b, v = points(*a), points(*b, seed=1), points(*v, seed=2)
    found = kl.kernel_matmul(GAUSSIAN, *map(gpu, (a, b, v)), bandwidth=2.0)
    wanted = kl.run_kernel(GAUSSIAN, a, b, bandwidth=2.0) @ v
    torch.testing.assert_close(host(found), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [3, 20])
def test_other_reductions(k, gpus):
    """Of NaN and of equal values the first, whichever part has it."""
    a, b = points(3, k), points(400, k, seed=1)
    b[7::100] = a[0]
    for descriptor, values in ((GAUSSIAN, {"bandwidth": 4.0}), (kl.l1_distance(), {})):
        matrix = kl.run_kernel(descriptor, a, b, **values)
        found = kl.kernel_sum(descriptor, gpu(a), gpu(b), **values)
        torch.testing.assert_close(host(found), matrix.sum(1))
        found = kl.kernel_logsumexp(descriptor, gpu(a), gpu(b), **values)
        torch.testing.assert_close(host(found), matrix.logsumexp(1))
        low, places = map(host, kl.kernel_min(descriptor, gpu(a), gpu(b), **values))
        torch.testing.assert_close(low, matrix.amin(1))
        assert torch.equal(places, matrix.argmin(1))
    a[1], b[250], b[70] = torch.nan, torch.nan, torch.nan
    low, places = map(host, kl.kernel_min(kl.l1_distance(), gpu(a), gpu(b)))
    assert low.isnan().all() and places.tolist() == [70, 0, 70]


def test_a_plan_is_made_once(monkeypatch):
    made, load = [], kernels.load_lowered
    monkeypatch.setattr(kernels, "load_lowered", lambda *given: made.append(1) or load(*given))
    a, b, v = (gpu(points(*shape)) for shape in ((30, 3), (300, 3), (300, 2)))
    for bandwidth in (1.0, 2.0, torch.tensor(3.0), torch.tensor(4.0)):
        kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=gpu(bandwidth))
    assert len(made) == 2  # numbers of the host, numbers on the device
    kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.0, regularization=0.1)
    assert len(made) == 3
