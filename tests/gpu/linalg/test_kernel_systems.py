"""Kernel systems on a GPU: by a CUDA graph, on any stream and device."""

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
    left = (y.double() - k @ found.x.double()).norm(dim=0) / y.double().norm(dim=0)
    assert (left <= 2e-5).all()


def test_numbers_in_host_memory_and_on_the_device(plain, device, seed):
    x, y = torch.randn(700, 5, device=device), torch.randn(700, device=device)
    lengths = torch.linspace(0.5, 1.5, 5)
    wanted = plain(x, y, lengthscale=lengths)
    for given in (lengths, lengths.to(device)):
        torch.testing.assert_close(
            solved(x, y, lengthscale=given).x, wanted.x, rtol=1e-3, atol=1e-3
        )
    same(solved(x, y, bandwidth=torch.tensor(0.5, device=device)), plain(x, y))
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
    assert torch.cuda.memory_reserved() <= before + (2 << 20)
