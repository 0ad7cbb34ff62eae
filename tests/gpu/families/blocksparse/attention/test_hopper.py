"""Attention by wgmma on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention import hopper
from kernlib.runtime.devices import model
from tests.families.blocksparse.lowering.attention.cases import (
    CASES,
    HOPPER,
    Case,
    Made,
    launches_of,
)
from tests.gpu.families.blocksparse.attention.launches import BLOCKS, LARGE, MASKS, launch, loaded
from tests.gpu.watched import capture

pytestmark = pytest.mark.usefixtures("on_wgmma")


def lowered(made: Made, rows: int | None = None):
    """For the GPU, whose teams have several tiles if these are many."""
    problem, count = made.problem(), model(torch.cuda.current_device()).multiprocessors
    assert HOPPER.takes(problem, hopper.ARCH)
    return launches_of(HOPPER, problem, {"rows": rows} if rows else None, hopper.ARCH, count)


def run(made: Made, rows: int | None = None) -> torch.Tensor:
    made.out.fill_(7.0)
    made.launch(launch, lowered(made, rows))
    return made.out


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
@pytest.mark.parametrize("case", CASES)
def test_results_are_right(case, rows, seed):
    made = Made(CASES[case]._replace(values=CASES[case].features))
    run(made, rows)
    made.check()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("width", [16, 24, 64, 72, 96, 128, 136, 192, 256])
def test_every_width_and_block(width, block, seed):
    """With half the heads of k and v."""
    for numbers, rows in (("float16", 64), ("bfloat16", 128)):
        case = LARGE._replace(numbers=numbers, block=block, features=width, values=width)
        made = Made(case._replace(kv_heads=2))
        run(made, rows)
        made.check()


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_mask_and_block(block, mask, rows, seed):
    """The same bits each time."""
    case = LARGE._replace(block=block, features=64, values=64, density=0.6, **MASKS[mask])
    made = Made(case)
    first = run(made, rows).clone()
    made.check()
    for _ in range(20):
        assert run(made, rows).equal(first)


@pytest.mark.parametrize("block", [(128, 128), (64, 64), (16, 16)], ids=str)
def test_many_tiles_of_a_team(block, seed):
    """By an order, of lengths from none to all."""
    case = Case("bfloat16", block, 4096, 4096, 128, 128, heads=8, layout="head", kv_heads=8)
    made = Made(case)
    keep = torch.rand(made.layout.mask().shape) < torch.rand(*made.layout.mask().shape[:-1], 1)
    made.layout.update_(made.layout.mask() & keep)
    for rows in hopper.TILE_ROWS:
        found = lowered(made, rows)
        assert len(found.steps) == 2 or rows < block[0]
        first = run(made, rows).clone()
        made.check()
        for _ in range(10):
            assert run(made, rows).equal(first)


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
def test_what_is_left_out_may_be_anything(rows, seed):
    case = LARGE._replace(causal=True, window=(400, 0), lengths=True, features=64, values=64)
    made = Made(case)
    made.kv_lengths.fill_(950)
    clean = run(made, rows).clone()
    for t, value in ((made.k, math.nan), (made.v, math.nan), (made.v, math.inf)):
        kept = t[:, :, 950:].clone()
        t[:, :, 950:] = value
        assert run(made, rows).equal(clean)
        t[:, :, 950:] = kept
    made.v[:, :, 437, 3] = math.nan
    found, unseen = run(made, rows), ~made.sees()[..., 437]
    assert found[..., 3][~unseen].isnan().all()
    made.check()


@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
def test_long_rows(rows, seed):
    """More words of blocks than a warp looks at at once."""
    case = Case(queries=64, keys=40000, heads=1, kv_heads=1, density=0.01, features=64, values=64)
    made = Made(case)
    run(made, rows)
    made.check()


def test_contents_change_between_replays_of_a_graph(seed):
    made = Made(LARGE._replace(features=64, values=64))
    call = loaded(lowered(made), made.layout, made.scalars, **made.operands())
    call()
    with capture() as graph:
        call()
    stored = made.layout.mask()
    for density in (0.3, 1.0, 0.0):
        made.layout.update_(stored & (torch.rand(stored.shape) < density))
        graph.replay()
        made.check()


def test_many_heads(seed):
    case = Case(queries=16, keys=16, batch=300, heads=300, kv_heads=100, density=1.0)
    made = Made(case._replace(features=16, values=16))
    run(made)
    made.check()
