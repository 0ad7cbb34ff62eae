"""Gradients of attention by mma.sync on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

from tests.families.blocksparse.lowering.attention.cases import ARCH, CASES, Case, error
from tests.families.blocksparse.lowering.attention.gradients import GATES, PORTABLE, Gradients
from tests.families.blocksparse.lowering.attention.scores import soft_bias
from tests.gpu.families.blocksparse.attention.launches import BLOCKS, LARGE, MASKS, WIDTHS, launch

pytestmark = pytest.mark.usefixtures("on_gpu")


def choices(made: Gradients) -> list[dict]:
    return PORTABLE.choices(made.problem(), ARCH)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_right(case, seed):
    made = Gradients(CASES[case])
    for choice in choices(made):
        made.run(launch, choice)
        made.check()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_block(width, block, seed):
    for numbers in GATES:
        values = min(256, 2 * width) if numbers == "float16" else width
        case = LARGE._replace(
            numbers=numbers, block=block, features=width, values=values, kv_heads=2
        )
        made = Gradients(case, grad_lse=numbers == "float16")
        made.run(launch)
        made.check()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_mask_and_block(block, mask, seed):
    """The same bits each time, whatever else is wanted."""
    case = LARGE._replace(block=block, features=64, values=64, density=0.6, **MASKS[mask])
    made = Gradients(case)
    for choice in choices(made):
        made.run(launch, choice)
        made.check()
        first = [t.clone() for t in made.results]
        for _ in range(5):
            made.run(launch, choice)
            assert all(map(torch.equal, made.results, first))
        for index in range(3):
            made.run(launch, choice, tuple(index == own for own in range(3)))
            assert made.results[index].equal(first[index])


def test_what_is_left_out_may_be_anything(seed):
    case = LARGE._replace(causal=True, window=(400, 0), lengths=True, features=64, values=64)
    made = Gradients(case)
    given = made.made
    given.kv_lengths.fill_(950)
    given.q_lengths.fill_(900)
    made.renew()
    made.run(launch)
    made.check()
    clean = [t.clone() for t in made.results]
    ends = (given.k, 950), (given.v, 950), (given.q, 900), (given.grad, 900), (given.out, 900)
    for t, end in ends:
        t[:, :, end:] = math.nan
    made.run(launch)
    assert all(map(torch.equal, made.results, clean))


@pytest.mark.parametrize("dropout", (0.0, 0.25))
@pytest.mark.parametrize("width", (32, 128, 256))
def test_scores_and_what_they_capture(width, dropout, seed):
    rows, cols = 500, 700
    captured = (
        torch.randn(1, 1, rows, 1) * 0.3,
        torch.randn(1, 4, 1, cols),
        torch.randn(2, 1, rows, cols) * 0.5,
    )
    case = Case(queries=rows, keys=cols, features=width, values=width, batch=2, heads=4, kv_heads=2)
    case = soft_bias(case._replace(causal=True, density=0.5, dropout=dropout))
    made = Gradients(case, captured)
    sums = {
        (0, "row"): torch.zeros(2, 4, rows, 1),
        (1, "col"): torch.zeros(2, 4, 1, cols),
        (2, "pair"): torch.zeros(2, 4, rows, cols),
    }
    made.run(launch, sums=sums)
    made.check()
    doubles = tuple(t.double().requires_grad_() for t in captured)
    for found, wanted, t in zip(sums.values(), made.wanted(doubles)[3:], captured, strict=True):
        over = [dim for dim in range(4) if t.shape[dim] == 1]
        assert error(found.sum(over, keepdim=True), wanted) <= 2e-3
