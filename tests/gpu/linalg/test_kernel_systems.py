"""Kernel systems on a GPU: by a CUDA graph, on any stream and device."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kernlib
from kernlib import linalg
from kernlib.linalg import iterative


def solved(x, y, **arguments):
    generator = torch.Generator(x.device).manual_seed(0)
    limits = {"regularization": 1e-2, "tol": 1e-5, "check_every": 4, "rank": 20}
    given = {"bandwidth": 0.5} if "lengthscale" not in arguments else {}
    values = limits | given | arguments
    return linalg.solve_kernel(kernlib.gaussian(), x, y, generator=generator, **values)


@pytest.fixture
def plain(monkeypatch):
    """Solves without a graph."""

    def call(*tensors, **arguments):
        with monkeypatch.context() as patched:
            patched.setattr(iterative, "is_capturable", lambda device: False)
            return solved(*tensors, **arguments)

    return call


def same(found, wanted):
    assert found.iterations == wanted.iterations > 4
    assert torch.equal(found.x, wanted.x) and torch.equal(found.residual, wanted.residual)


@pytest.mark.parametrize("columns", [None, 1, 3, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", [3, 40])
def test_a_graph_changes_no_bit(columns, dtype, features, plain, device, seed):
    x = torch.randn(1501, features, dtype=dtype, device=device)
    y = torch.randn(1501, *[columns] * (columns is not None), dtype=dtype, device=device)
    arguments = {"bandwidth": 0.5 * features**0.5}
    found = solved(x, y, **arguments)
    same(found, plain(x, y, **arguments))
    k = kernlib.run_kernel(kernlib.gaussian(), x.double(), x.double(), **arguments)
    k.diagonal().add_(1e-2)
    w, norm = found.x.double(), y.double().norm(dim=0)
    left = (y.double() - k @ w).norm(dim=0) / norm
    torch.testing.assert_close(found.residual, left, rtol=1e-3, atol=0)
    # What is asked for, or what rounding the terms of a product leaves. In float32 that is 2.2e-3
    # of 3 features, whose w are 90 times as long as y: 1501 points gave up to 7e-4, on an H100 and
    # by torch on a CPU, and the solution itself, rounded to float32, up to 3.2e-5. Of 40 features
    # it is 5e-6.
    rounding = torch.finfo(dtype).eps * (k.abs() @ w.abs()).norm(dim=0) / norm
    assert (left <= 2e-5 + rounding).all()


def test_numbers_in_host_memory_and_on_the_device(plain, device, seed):
    x, y = torch.randn(700, 5, device=device), torch.randn(700, device=device)
    lengths = torch.linspace(0.5, 1.5, 5, device=device)
    same(solved(x, y, lengthscale=lengths), plain(x, y, lengthscale=lengths))
    with pytest.raises(ValueError, match="lengthscale must be on the inputs' device"):
        solved(x, y, lengthscale=lengths.cpu())
    same(solved(x, y, bandwidth=torch.tensor(0.5, device=device)), plain(x, y))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The CUDA Graph is empty")
        same(solved(x, y, bandwidth=torch.tensor(0.5)), plain(x, y))


def test_another_stream(plain, device, seed):
    x, y = torch.randn(900, 4, device=device), torch.randn(900, 2, device=device)
    wanted = plain(x, y)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        same(solved(x, y), wanted)
    stream.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device(plain, seed):
    x, y = torch.randn(900, 4, device="cuda:1"), torch.randn(900, device="cuda:1")
    same(solved(x, y), plain(x, y))


def test_memory_goes_back(device, seed):
    x, y = torch.randn(20000, 3, device=device), torch.randn(20000, device=device)
    solved(x, y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        solved(x, y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # Three workspaces of cuBLAS, of streams that nobody uses again, would be 96 MiB.
    assert torch.cuda.memory_reserved() <= before + (2 << 20)


def test_threads_at_a_time(plain, device, seed):
    systems = [(torch.randn(900, 4, device=device), torch.randn(900, 2, device=device))] * 3
    systems = [(x + index, y * (index + 1)) for index, (x, y) in enumerate(systems)]
    wanted = [plain(*each) for each in systems]
    torch.cuda.synchronize()

    def work(each):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return [solved(*each) for _ in range(3)]

    with ThreadPoolExecutor(len(systems)) as pool:
        for found, one in zip(pool.map(work, systems), wanted, strict=True):
            for each in found:
                same(each, one)
