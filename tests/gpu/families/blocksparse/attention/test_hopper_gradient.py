"""Gradients of attention by wgmma on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention.gradient import hopper
from tests.families.blocksparse.lowering.attention.cases import CASES
from tests.families.blocksparse.lowering.attention.gradients import GATES, HOPPER, Gradients
from tests.gpu.families.blocksparse.attention.launches import BLOCKS, LARGE, MASKS, launch

pytestmark = pytest.mark.usefixtures("on_wgmma")


def run(made: Gradients, rows: int, needs=(True, True, True)) -> list[torch.Tensor]:
    made.run(launch, {"rows": rows}, needs, kernel=HOPPER)
    return made.results


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_right(case, rows, seed):
    made = Gradients(CASES[case]._replace(values=CASES[case].features), grad_lse=True)
    if not HOPPER.takes(made.problem(), hopper.ARCH):
        assert made.made.case.features > 128
        return
    run(made, rows)
    made.check()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("width", [16, 24, 64, 72, 96, 128])
def test_every_width_and_block(width, block, seed):
    """With half the heads of k and v."""
    for numbers, rows in zip(GATES, hopper.TILE_ROWS, strict=True):
        case = LARGE._replace(numbers=numbers, block=block, features=width, values=width)
        made = Gradients(case._replace(kv_heads=2), grad_lse=numbers == "float16")
        run(made, rows)
        made.check()


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_mask_and_block(block, mask, rows, seed):
    """The same bits each time, whatever else is wanted."""
    case = LARGE._replace(block=block, features=64, values=64, density=0.6, **MASKS[mask])
    made = Gradients(case)
    first = [t.clone() for t in run(made, rows)]
    made.check()
    for _ in range(10):
        assert all(map(torch.equal, run(made, rows), first))
    for index in range(3):
        found = run(made, rows, tuple(index == own for own in range(3)))
        assert found[index].equal(first[index])


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
def test_what_is_left_out_may_be_anything(rows, seed):
    case = LARGE._replace(causal=True, window=(400, 0), lengths=True, features=64, values=64)
    made = Gradients(case)
    given = made.made
    given.kv_lengths.fill_(950)
    given.q_lengths.fill_(900)
    made.renew()
    clean = [t.clone() for t in run(made, rows)]
    made.check()
    for t, end in ((given.k, 950), (given.v, 950), (given.q, 900), (given.grad, 900)):
        t[:, :, end:] = math.nan
    assert all(map(torch.equal, run(made, rows), clean))
