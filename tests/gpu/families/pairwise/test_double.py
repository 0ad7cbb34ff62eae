"""Products and row sums of kernel matrices in float64 on the GPU, by one kernel."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.kernels import double
from tests.families.pairwise.forwards import bandwidth
from tests.families.pairwise.reductions.double_cases import DESCRIPTORS, GAUSSIAN
from tests.gpu.families.pairwise.cases import lowered_by, points, reference
from tests.gpu.watched import peak
from tests.support import hostile


@pytest.fixture(autouse=True)
def launched():
    """What was lowered for this kernel."""
    with lowered_by(double.DoubleSmall, double.Double) as made:
        yield made


def doubles(*shape):
    return points(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    "k, blocks",
    [(1, "fitted"), (3, "whole"), (8, "fitted"), (9, "whole"), (21, "fitted"), (130, "fitted")],
    indirect=["blocks"],
)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_every_kind_of_sum(name, k, blocks, launched, seed):
    descriptor, values = DESCRIPTORS[name]
    a, b, v = doubles(301, k), doubles(777, k), doubles(777, 3)
    b[5] = a[3]
    matrix, weights = reference(descriptor, a, b, **values), v.cpu()
    found = kl.kernel_matmul(descriptor, a, b, v, **values)
    # A power of 3 takes its sum's error three times.
    bars = {torch.float64: 3e-13}
    hostile.check(found, matrix @ weights, matrix.abs() @ weights.abs(), where=name, bars=bars)
    found = kl.kernel_sum(descriptor, a, b, **values)
    hostile.check(found, matrix.sum(1), matrix.abs().sum(1), where=name, bars=bars)
    assert len(launched) == 2


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("size", [(1, 1), (63, 65), (64, 128), (1, 100_003), (20_011, 3)], ids=str)
@pytest.mark.parametrize(
    "k, blocks", [(3, "fitted"), (3, "whole"), (64, "fitted")], indirect=["blocks"]
)
def test_sizes_and_columns(k, size, columns, blocks, launched, seed):
    a, b, v = doubles(size[0], k), doubles(size[1], k), doubles(size[1], columns)
    matrix, weights = reference(GAUSSIAN, a, b, bandwidth=k**0.5), v.cpu()
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=k**0.5)
    hostile.check(found, matrix @ weights, matrix @ weights.abs())
    assert len(launched) == -(-columns // 8)


@pytest.mark.parametrize("features", [3, 19, 64])
@pytest.mark.parametrize("name", hostile.NAMES)
def test_hostile_points(name, features, launched):
    sizes = {"rows": 300, "columns": 500, "features": features}
    case = hostile.case(name, torch.float64, "cuda", **sizes)
    width, v = bandwidth(case), doubles(500, 2)
    # A power of two changes no quotient; without it the reference's squares are denormals.
    up = 2.0 ** min(-math.frexp(width)[1], 1000)
    matrix = reference(GAUSSIAN, case.a * up, case.b * up, bandwidth=width * up)
    weights = v.cpu()
    found = kl.kernel_matmul(GAUSSIAN, case.a, case.b, v, bandwidth=width)
    hostile.check(found, matrix @ weights, weights.abs().sum(0), where=name)
    squares = reference(kl.squared_distance(), case.a, case.b)
    found = kl.kernel_sum(kl.squared_distance(), case.a, case.b)
    hostile.check(found, squares.sum(1), where=name)
    assert len(launched) == 2


@pytest.mark.parametrize("shape", [((3, 70, 9), (3, 130, 9)), ((3, 70, 9), (130, 9))], ids=str)
def test_batches(shape, seed):
    a, b, v = doubles(*shape[0]), doubles(*shape[1]), doubles(3, 130, 2)
    a += torch.tensor([0.0, 1e3, -1e3], device="cuda", dtype=torch.float64)[:, None, None]
    widths = torch.tensor([1.0, 2.0, 3.0], device="cuda", dtype=torch.float64)
    matrix, weights = reference(kl.cauchy(), a, b, bandwidth=widths), v.cpu()
    found = kl.kernel_matmul(kl.cauchy(), a, b, v, bandwidth=widths)
    hostile.check(found, matrix @ weights, matrix @ weights.abs())


@pytest.mark.parametrize("k", [3, 64])
def test_memory_is_that_of_points(k, seed):
    count = 40_000  # whose matrix takes 12.8 GB
    a, v = doubles(count, k), doubles(count, 2)
    call = partial(kl.kernel_matmul, GAUSSIAN, a, a, v, bandwidth=3.0)
    call()
    _, most = peak(call)
    assert most <= (65 << 20) + 2 * 8 * (count + 64) * (64 + 1)


@pytest.mark.parametrize("k", [3, 20])
def test_gradients(k, seed):
    inputs = [doubles(*s).requires_grad_() for s in ((300, k), (400, k), (400, 3))]
    out = kl.kernel_matmul(GAUSSIAN, *inputs, bandwidth=2.0)
    along = doubles(300, 3)
    found = torch.autograd.grad(out, inputs, along)
    wide = [x.detach().clone().requires_grad_() for x in inputs]
    squares = (wide[0][:, None] - wide[1][None]).square().sum(-1)
    wanted = torch.autograd.grad((-squares / 8).exp() @ wide[2], wide, along)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 1e-12 * y.norm()
