"""Reductions whose gradient is recorded, called again after their way has been decided: kernels run
on the host from the call on, against float64."""

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.reductions import operation
from kernlib.runtime.plan import forget_plans
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.emulation.gpus import gpu, host

pytestmark = pytest.mark.emulated
GAUSSIAN = kl.gaussian()
GENERATOR = torch.Generator().manual_seed(0)
A, B, V = (torch.randn(*size, generator=GENERATOR) for size in ((30, 3), (40, 3), (40, 2)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kernels_of(tmp_path_factory)


@pytest.fixture(autouse=True)
def gpus(monkeypatch, folder):
    forget_plans()
    yield emulated.install(monkeypatch, folder, operation)
    forget_plans()


def product(a, b, v, **options):
    return kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=2.0, **options)


def near(y, a=A, b=B, v=V) -> None:
    expected = kl.run_kernel(GAUSSIAN, a.double(), b.double(), bandwidth=2.0) @ v.double()
    assert (host(y.detach()).double() - expected).norm() <= 1e-5 * expected.norm()


def test_lazy_and_strided_tensors_are_read_as_they_are_each_time():
    leaf, negative = gpu(V).requires_grad_(), torch._neg_view(gpu(-B))
    near(product(gpu(A), gpu(B), leaf))
    for _ in range(3):
        near(product(gpu(A), negative, leaf))
    wide = torch.randn(30, 8, generator=GENERATOR)
    near(product(gpu(wide)[:, :3], gpu(B), leaf), a=wide[:, :3])
    with torch.inference_mode():
        inference = gpu(wide.clone())[:, :3]
    for _ in range(2):  # saved as a copy, which has other strides
        near(product(inference, gpu(B), leaf), a=wide[:, :3])


def test_offsets_and_a_second_side_are_checked_each_time():
    leaf = gpu(V).requires_grad_()
    for _ in range(2):
        near(product(gpu(A), gpu(B), leaf, row_offset=np.array(0)))
        product(gpu(A), gpu(B), leaf, row_offset=1)
    for wrong in (1.0, True):
        with pytest.raises(TypeError, match="row_offset must be an int"):
            product(gpu(A), gpu(B), leaf, row_offset=wrong)
    symmetric, x = kl.gaussian(symmetric=True), gpu(A).requires_grad_()
    v = gpu(torch.ones(30, 2))
    for _ in range(2):
        kl.kernel_matmul(symmetric, x, x, v, bandwidth=2.0)
        with pytest.raises(ValueError, match="leave b out"):
            kl.kernel_matmul(symmetric, x, gpu(2 * A), v, bandwidth=2.0)
