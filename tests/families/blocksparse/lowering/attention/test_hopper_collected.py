"""Gradients by captured tensors beside those by wgmma, run by threads of the host, against those of
the formula in float64; and what NVRTC makes of them."""

from functools import partial

import pytest
import torch

from kernlib.families.blocksparse.layout import NAMES
from kernlib.families.blocksparse.lowering.attention import hopper_gradient
from kernlib.lowering.steps import WORKSPACE
from tests.families.blocksparse.lowering.attention.cases import Case, error
from tests.families.blocksparse.lowering.attention.gradients import GATES, Gradients
from tests.families.blocksparse.lowering.attention.scores import soft_bias
from tests.support.emulation import maps
from tests.support.emulation.emulator import COMPILER, Emulator
from tests.support.speeds import slow_but

on_host = pytest.mark.skipif(COMPILER is None, reason="needs g++")
ROWS, COLS = 75, 90


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("kernels"))


def launch(emulator, lowered, layout, scalars, **operands) -> None:
    """The launches, in a workspace that begins as NaN."""
    known = {**dict(zip(NAMES, layout.tensors, strict=True)), **operands}
    known[WORKSPACE] = torch.full((lowered.workspace,), 255, dtype=torch.uint8)
    for step in lowered.steps:
        given = [(known[name], at) for name, at in step.pointers]
        addresses = [0 if t is None else t.data_ptr() + at for t, at in given]
        maps.launch(emulator, step, addresses, scalars)


def run(made: Gradients, emulator, sums: dict, rows=128, needs=(True, True, True)) -> None:
    given = {"sums": sums, "kernels": hopper_gradient}
    made.run(partial(launch, emulator), {"rows": rows}, needs, **given)


def captured(batch=(1, 1, 2), heads=(1, 4, 1)) -> tuple[torch.Tensor, ...]:
    """Of rows, of columns, and of pairs of both."""
    return (
        torch.randn(batch[0], heads[0], ROWS, 1) * 0.3,
        torch.randn(batch[1], heads[1], 1, COLS),
        torch.randn(batch[2], heads[2], ROWS, COLS) * 0.5,
    )


def compare(made: Gradients, sums: dict, given: tuple[torch.Tensor, ...]) -> None:
    """What is collected, summed over what a tensor does not have."""
    doubles = tuple(t.double().requires_grad_() for t in given)
    wanted = made.wanted(doubles)[3:]
    for (index, _), found in sums.items():
        over = [dim for dim in range(4) if given[index].shape[dim] == 1]
        assert error(found.sum(over, keepdim=True), wanted[index]) <= GATES[made.made.case.numbers]


CASE = Case(queries=ROWS, keys=COLS, batch=2, heads=4, kv_heads=2, causal=True, density=0.8)


@on_host
@pytest.mark.parametrize("dropout", slow_but((0.25,), (0.0, 0.25)))
@pytest.mark.parametrize("rows", hopper_gradient.TILE_ROWS)
def test_every_axis(rows, dropout, emulator, seed):
    """By rows of all heads, columns of a head, pairs of a batch; a mask leaves some out."""
    given = captured()
    made = Gradients(soft_bias(CASE._replace(dropout=dropout)), given)
    sums = {
        (0, "row"): torch.zeros(2, 4, ROWS, 1),
        (1, "col"): torch.zeros(2, 4, 1, COLS),
        (2, "pair"): torch.zeros(2, 4, ROWS, COLS),
    }
    run(made, emulator, sums, rows)
    made.check()
    compare(made, sums, given)
