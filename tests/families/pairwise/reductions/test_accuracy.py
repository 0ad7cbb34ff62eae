"""Reductions, array gradients and agop on hostile points, on the CPU."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.reductions import blocks
from tests.families.pairwise import reduction_hostile as reductions


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", reductions.CHECKS)
def test_reductions_meet_the_bar_on_hostile_points(name, dtype):
    reductions.CHECKS[name](dtype, "cpu")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("sums", "choices", "array gradients"))
def test_half_types_are_rounded_once(name, dtype):
    reductions.CHECKS[name](dtype, "cpu")


@pytest.mark.parametrize("name", ("bandwidths", "far points"))
def test_bandwidths_keep_their_digits_beside_points_of_bfloat16(name):
    reductions.CHECKS[name](torch.bfloat16, "cpu")


@pytest.mark.few(8)
@pytest.mark.parametrize("columns", (1, 3, 15))
@pytest.mark.parametrize("rows", (1, 3))
def test_long_sums_are_as_accurate_as_short_ones(rows, columns):
    points = torch.Generator().manual_seed(rows)
    a, b = (torch.rand(n, 2, generator=points) for n in (rows, 200_003))
    v = torch.rand(b.shape[0], columns, generator=points)  # no term cancels another
    got = kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0)
    matrix = kl.run_kernel(kl.gaussian(), a.double(), b.double(), bandwidth=2.0)
    torch.testing.assert_close(got.double(), matrix @ v.double(), rtol=1e-6, atol=0)
    by_features = kl.run_kernel(kl.dot_product(), v.T, matrix.float())
    wanted = v.double().T @ matrix.float().double().T
    torch.testing.assert_close(by_features.double(), wanted, rtol=1e-6, atol=0)


def test_sums_of_many_blocks_are_as_accurate_as_those_of_one(monkeypatch):
    monkeypatch.setattr(blocks, "CPU_BLOCK_BYTES", 256)
    points = torch.Generator().manual_seed(2)
    a, b = (torch.rand(n, 1, generator=points) for n in (1, 70_001))
    v = torch.rand(b.shape[0], generator=points)
    matrix = kl.run_kernel(kl.gaussian(), a.double(), b.double(), bandwidth=2.0)
    for got, wanted in (
        (kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0), matrix @ v.double()),
        (kl.kernel_sum(kl.gaussian(), a, b, bandwidth=2.0), matrix.sum(-1)),
        (kl.kernel_logsumexp(kl.gaussian(), a, b, bandwidth=2.0), matrix.logsumexp(-1)),
    ):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)
