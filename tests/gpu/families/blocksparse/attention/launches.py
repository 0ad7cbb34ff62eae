"""Lowered attention on the GPU, by way of neither descriptor nor front door, which may choose other
kernels: every kernel that there is, against its formula in float64."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.lowering.steps import WORKSPACE, Lowered
from kernlib.runtime.sequence import load_lowered
from tests.families.blocksparse.lowering.attention.cases import Case

WIDTHS = (16, 24, 64, 72, 96, 128, 192, 256)
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (16, 128), (128, 32))
LARGE = Case(queries=1000, keys=1300, batch=2, heads=4, density=0.3, layout="batch")
MASKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 50)},
    "lengths": {"lengths": True},
    "dropout": {"dropout": 0.2},
    "all": {"causal": True, "window": (300, 300), "lengths": True, "dropout": 0.1},
}


def launch(lowered: Lowered, layout: Layout, scalars: tuple, **operands: torch.Tensor) -> None:
    """The launches, of tensors by the names that steps have for them; waits for them."""
    loaded(lowered, layout, scalars, **operands)()
    torch.cuda.synchronize()


def loaded(lowered: Lowered, layout: Layout, scalars: tuple, **operands: torch.Tensor):
    """What launches these again and again."""
    known = {**dict(zip(NAMES, layout.tensors, strict=True)), **operands}
    wanted = (name for step in lowered.steps for name, _ in step.pointers)
    names = tuple(dict.fromkeys(name for name in wanted if name != WORKSPACE))
    plan = load_lowered(lowered, names, layout.device)
    numbers = [part for value in scalars for part in (value, 0)]
    addresses = [0 if known[name] is None else known[name].data_ptr() for name in names]
    return lambda: plan.launch(addresses, numbers)
