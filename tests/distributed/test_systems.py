"""Systems of points that are spread over processes."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist

import kernlib as kl

SIZES = 60, 0, 41  # by rank


def problem(dtype):
    generator = torch.Generator().manual_seed(4)
    x = torch.rand((sum(SIZES), 2), generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randn((sum(SIZES), 2), generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def solved(dtype, rank: int, each: bool, folder: str | None = None, max_iter: int = 400):
    """The relative residual as it is, as the result says, and the number of iterations."""
    x, y = problem(dtype)
    at = dist.get_rank()
    mu = torch.full((sum(SIZES),), 0.05, dtype=dtype) if each else 0.05
    part = mu.split(SIZES)[at] if each else mu
    names = {"bandwidth": 0.5, "tol": 1e-9 if dtype is torch.float64 else 5e-5}
    result = kl.linalg.solve_kernel(
        kl.gaussian(), x.split(SIZES)[at], y.split(SIZES)[at], regularization=part, rank=rank,
        group=kl.distributed.Communicator(), checkpoint=folder, max_iter=max_iter,
        check_every=5, **names,
    )  # fmt: skip
    parts = [torch.empty((size, 2), dtype=dtype) for size in SIZES]
    for rank_of, part_of in enumerate(parts):
        if rank_of == at:
            part_of.copy_(result.x)
        if part_of.numel():
            dist.broadcast(part_of, rank_of)
    w, x, y = torch.cat(parts).double(), x.double(), y.double()
    k = kl.run_kernel(kl.gaussian(), x, x, bandwidth=0.5) + 0.05 * torch.eye(len(x), dtype=x.dtype)
    residual = (y - k @ w).norm(dim=0) / y.norm(dim=0)
    return residual, result.residual, result.iterations, w


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("rank", [0, 30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_residual_is_below_tol(pool, dtype, rank, each):
    tol = 1e-9 if dtype is torch.float64 else 5e-5
    for answer in pool.run(solved, dtype, rank, each):
        if isinstance(answer, Exception):
            raise answer
        residual, said, iterations, _ = answer
        torch.testing.assert_close(residual, said, rtol=1e-3, atol=1e-12)
        assert float(residual.max()) <= tol and iterations <= (60 if rank else 200)


def resumed(folder: str):
    """Ten iterations, then the rest; and all at once."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kl.ConvergenceWarning)
        solved(torch.float64, 5, False, folder, max_iter=10)
    torch.manual_seed(dist.get_rank())
    *_, iterations, w = solved(torch.float64, 5, False, folder)
    *_, others, whole = solved(torch.float64, 5, False)
    return iterations, others, float((w - whole).norm() / whole.norm())


def test_a_checkpoint_goes_on(pool):
    with tempfile.TemporaryDirectory() as folder:
        for iterations, others, difference in pool.run(resumed, folder):
            assert difference < 1e-7 and iterations > 10 and others > 10
