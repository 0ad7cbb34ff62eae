"""Falkon's rows go to the GPU from wherever they lie, and a group of one process gives its bits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import kernlib as kl
from kernlib.linalg import streamed

ROWS, CENTRES = 5000, 150


def fit(x, y, centres, **options):
    return kl.linalg.falkon(
        kl.gaussian(), x, y, centres, regularization=1e-5, bandwidth=1.0, tol=1e-5, max_iter=40,
        **options,
    )  # fmt: skip


@pytest.fixture
def rows(seed):
    x = torch.rand(ROWS, 3, device="cpu")
    return x, (3 * x).sin().sum(1, keepdim=True), x[:CENTRES].cuda()


@pytest.mark.parametrize("place", ["device", "pinned", "host", "array"])
def test_rows_may_lie_anywhere(rows, place, monkeypatch):
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 12_000)
    x, y, centres = rows
    put = {
        "device": torch.Tensor.cuda,
        "pinned": torch.Tensor.pin_memory,
        "host": lambda t: t,
        "array": torch.Tensor.numpy,
    }[place]
    result = fit(put(x), put(y), centres)
    wide = fit(x.double().cuda(), y.double().cuda(), centres.double())
    names = {"bandwidth": 1.0}
    got = kl.kernel_matmul(kl.gaussian(), x.cuda(), centres, result.coefficients, **names).double()
    wanted = kl.kernel_matmul(
        kl.gaussian(), x.double().cuda(), centres.double(), wide.coefficients, **names
    )
    assert float((got - wanted).norm() / wanted.norm()) < 2e-3
    assert float((wanted - y.cuda()).norm() / y.norm()) < 3e-2


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """This process alone, over NCCL."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield kl.distributed.Communicator()
    dist.destroy_process_group()


@pytest.mark.parametrize("task", ["kernel_matmul", "kernel_logsumexp", "kernel_topk"])
def test_one_process_gives_the_same_bits(group, task, seed):
    a, b, v = (torch.randn(size, device="cuda") for size in ((700, 5), (900, 5), (900, 2)))
    tensors = (a, b, v)[: 3 if task == "kernel_matmul" else 2]
    results = []
    for module, names in ((kl.distributed, {"group": group}), (kl, {})):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = getattr(module, task)(kl.gaussian(), *leaves, bandwidth=1.5, **names)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        results.append([out, *(t.grad for t in leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_system_of_one_process(group, seed):
    x = torch.rand(3000, 3, device="cuda")
    y = (3 * x).sin().sum(1)
    result = kl.linalg.solve_kernel(
        kl.gaussian(), x, y, regularization=0.1, bandwidth=0.7, tol=1e-5, group=group
    )
    assert float(result.residual) <= 1e-5 and result.x.shape == y.shape
