"""Gradients by captured tensors beside those by wgmma on the GPU against float64."""

from __future__ import annotations

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention.gradient import hopper
from tests.families.blocksparse.lowering.attention.cases import Case
from tests.families.blocksparse.lowering.attention.gradients import (
    HOPPER,
    Gradients,
    check_sums,
    soft_tensors,
    sums_of,
)
from tests.families.blocksparse.lowering.attention.scores import soft_bias
from tests.gpu.families.blocksparse.attention.launches import BLOCKS, MASKS, launch

pytestmark = pytest.mark.usefixtures("on_wgmma")

WHOLE = Case(queries=600, keys=700, batch=2, heads=4, kv_heads=2, density=0.5, layout="batch")


def run(made: Gradients, sums: dict, rows: int, needs=(True, True, True)) -> None:
    made.run(launch, {"rows": rows}, needs, sums=sums, kernel=HOPPER)


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
@pytest.mark.parametrize("width", (32, 64, 80, 96, 128))
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_width_and_block(block, width, rows, seed):
    """Of an odd number of columns too, of which no two are written at once."""
    keys = WHOLE.keys + (block[0] == 32)
    case = soft_bias(WHOLE._replace(block=block, features=width, values=width, keys=keys))
    given = soft_tensors(case)
    made, sums = Gradients(case, given, grad_lse=True), sums_of(case)
    run(made, sums, rows)
    made.check()
    check_sums(made, sums, given)


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", (64, 128))
def test_every_mask(width, mask, rows, seed):
    """The same bits each time, whatever else is wanted."""
    case = WHOLE._replace(numbers="bfloat16", block=(64, 64), features=width, values=width)
    case = soft_bias(case._replace(**MASKS[mask]))
    given = soft_tensors(case)
    made, first = Gradients(case, given), sums_of(case)
    run(made, first, rows)
    made.check()
    check_sums(made, first, given)
    results = [t.clone() for t in made.results]
    for _ in range(5):
        sums = sums_of(case)
        run(made, sums, rows)
        assert all(map(torch.equal, sums.values(), first.values()))
        assert all(map(torch.equal, made.results, results))
    for key, known in first.items():
        alone = {key: torch.zeros_like(known)}
        run(made, alone, rows, (False, False, False))
        assert alone[key].equal(known)


@pytest.mark.parametrize("pairs", ((1, 4), (2, 1), (1, 1)), ids=str)
@pytest.mark.parametrize("width", (32, 128))
def test_sums_over_batches_and_heads(width, pairs, seed):
    """Of more columns than a block of threads has, the same bits each time."""
    case = WHOLE._replace(block=(32, 32), features=width, values=width, keys=1300)
    case = soft_bias(case)
    given = soft_tensors(case, pairs)
    made, first = Gradients(case, given), sums_of(case, pairs)
    run(made, first, 64)
    made.check()
    check_sums(made, first, given)
    for _ in range(3):
        sums = sums_of(case, pairs)
        run(made, sums, 64)
        assert all(map(torch.equal, sums.values(), first.values()))
