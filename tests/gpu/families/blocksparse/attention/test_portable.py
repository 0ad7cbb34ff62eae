"""Attention by mma.sync on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

from kernlib.runtime.devices import arch_of, model
from tests.families.blocksparse.lowering.attention.cases import (
    ARCH,
    CASES,
    GATES,
    PORTABLE,
    Case,
    Made,
    error,
    launches_of,
)
from tests.gpu.families.blocksparse.attention.launches import (
    BLOCKS,
    LARGE,
    MASKS,
    WIDTHS,
    launch,
    loaded,
)
from tests.gpu.watched import capture

pytestmark = pytest.mark.usefixtures("on_gpu")


def rows_of(made: Made) -> list[int]:
    return [choice["rows"] for choice in PORTABLE.choices(made.problem(), ARCH)]


@pytest.mark.parametrize("case", CASES)
def test_results_are_right(case, seed):
    made = Made(CASES[case])
    for rows in rows_of(made):
        made.run(launch, rows)
        made.check()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_and_block(width, block, seed):
    """With half the heads of k and v, and as many values again where there is room."""
    for numbers in GATES:
        values = min(256, 2 * width) if numbers == "float16" else width
        case = LARGE._replace(
            numbers=numbers, block=block, features=width, values=values, kv_heads=2
        )
        made = Made(case)
        for rows in rows_of(made):
            made.run(launch, rows)
            made.check()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_mask_and_block(block, mask, seed):
    """The same bits each time."""
    case = LARGE._replace(block=block, features=64, values=64, density=0.6, **MASKS[mask])
    made = Made(case)
    for rows in rows_of(made):
        first = made.run(launch, rows).clone()
        made.check()
        for _ in range(5):
            assert made.run(launch, rows).equal(first)


def test_what_is_left_out_may_be_anything(seed):
    case = LARGE._replace(causal=True, window=(400, 0), lengths=True, features=64, values=64)
    made = Made(case)
    made.kv_lengths.fill_(950)
    clean = made.run(launch).clone()
    for t, value in ((made.k, math.nan), (made.v, math.nan), (made.v, math.inf)):
        kept = t[:, :, 950:].clone()
        t[:, :, 950:] = value
        assert made.run(launch).equal(clean)
        t[:, :, 950:] = kept
    made.v[:, :, 437, 3] = math.nan
    found, unseen = made.run(launch), ~made.sees()[..., 437]
    assert found[..., 3][~unseen].isnan().all()
    # Rows that share a group with those that see it are summed in another order: a last bit.
    torch.testing.assert_close(found[unseen], clean[unseen], rtol=2**-10, atol=1e-5)


def test_long_rows(seed):
    """More tiles than a warp looks at at once, and more than one word of them."""
    case = Case(queries=64, keys=40000, heads=1, kv_heads=1, density=0.01, features=64, values=64)
    made = Made(case)
    for rows in rows_of(made):
        made.run(launch, rows)
        made.check()


def test_contents_change_between_replays_of_a_graph(seed):
    made = Made(LARGE)
    problem, index = made.problem(), torch.cuda.current_device()
    lowered = launches_of(PORTABLE, problem, None, arch_of(index), model(index).multiprocessors)
    run = loaded(lowered, made.layout, made.scalars, **made.operands())
    run()
    with capture() as graph:
        run()
    stored = made.layout.mask()
    for density in (0.3, 1.0, 0.0):
        made.layout.update_(stored & (torch.rand(stored.shape) < density))
        graph.replay()
        made.check()


def test_other_gpus_tiles_run_here(seed):
    """Those that a GPU of 99 KiB takes are among those of this one."""
    made = Made(LARGE._replace(features=256, values=256))
    for choice in PORTABLE.choices(made.problem(), "sm_86"):
        made.launch(launch, launches_of(PORTABLE, made.problem(), choice, "sm_86"))
        made.check()


def test_many_heads(seed):
    """More than a grid has rows for."""
    case = Case(queries=16, keys=16, batch=300, heads=300, kv_heads=100, density=1.0)
    made = Made(case._replace(features=16, values=16))
    assert error(made.run(launch), made.wanted()[0]) <= GATES["float16"]
