"""Few pairs on the GPU: chosen where they are to be, right as tiles are, with the same bits."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.pairwise.cases import by, check, points
from tests.gpu.watched import capture, launches

INF = math.inf
SHAPES = ((24, 111, 765), (13, 149, 384), (201, 12, 117), (20, 436, 689), (15, 19, 7), (1, 1, 1))


def launched(call) -> list[str]:
    """What a call launches, by description."""
    with launches() as found:
        call()
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", (1, 2, 1.3, INF))
def test_they_are_chosen_by_rule(shape, p, seed):
    m, n, k = shape
    forget_plans()
    (made,) = launched(lambda: kl.cdist(points(m, k), points(n, k), p=p))
    assert "few pairs" in made
    (made,) = launched(lambda: kl.cdist(points(2000, 30), points(1900, 30), p=1))
    assert "tile=" in made


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(shape, dtype, seed):
    m, n, k = shape
    a, b = points(m, k, dtype=dtype), points(n, k, dtype=dtype)
    for p in (0, 0.5, 1, 1.3, 1.5, 2, 2.5, 3, 4, 6, INF):
        bound = {torch.float32: 5e-6, torch.float64: 1e-12, torch.bfloat16: 8e-3}[dtype]
        check(kl.p_distance(), a, b, p=p, tolerance=bound * max(1, 1 / p if p else 1))
    check(kl.exp_power_sum(), a, b, p=1.5, inner_scale=-0.5, tolerance=10 * bound)
    if k > 100:  # a single logarithm may be next to none
        check(kl.Pairwise(inner=kl.PowerLog()), a, b, inner_p=1.3, tolerance=10 * bound)


@pytest.mark.parametrize("k", (16_384, 16_640, 100_000, 1_000_000))
def test_long_sums_of_equal_terms(k):
    a, b = torch.zeros(3, k, device="cuda"), torch.full((5, k), 1 / 3, device="cuda")
    wanted = b[0].double().sum().item()
    for p, power in ((1, wanted), (INF, 1 / 3)):
        found = kl.cdist(a, b, p=p).double()
        assert ((found - power).abs() <= 1.3e-6 * power).all()


@pytest.mark.parametrize("k", (7, 100, 765))
def test_the_same_call_has_the_same_bits(k, seed):
    """Whatever its neighbours, strides and outputs are."""
    a, b = points(24, k), points(111, k)
    for p in (1, 2, 3):
        first = kl.cdist(a, b, p=p)
        for _ in range(20):
            assert torch.equal(kl.cdist(a, b, p=p), first)
        out = torch.empty(111, 24, device="cuda").T
        assert torch.equal(kl.cdist(a, b.T.contiguous().T, p=p, out=out), first)
        assert torch.equal(kl.cdist(a[5:17], b[40:], p=p), first[5:17, 40:])


@pytest.mark.parametrize("p", (1, 1.3))
@pytest.mark.parametrize("batch", (16_384, 16_385))
def test_as_many_entries_as_it_takes_and_one_more(batch, p, seed):
    a, b = points(batch, 2, 5), points(3, 5)
    with by("few"):
        (made,) = launched(lambda: check(kl.p_distance(), a, b, p=p, tolerance=5e-6))
    assert ("few pairs" in made) == (batch == 16_384)


def test_it_is_captured(seed):
    a, b = points(300, 40), points(20, 40)
    out, wanted = torch.empty(300, 20, device="cuda"), kl.cdist(a, b, p=1)
    (made,) = launched(lambda: kl.cdist(a, b, p=1, out=out))
    assert "few pairs" in made
    with capture() as graph:
        kl.cdist(a, b, p=1, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
