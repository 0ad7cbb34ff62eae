"""Gradients on the GPU: of products, and of these."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.gpu.families.blocksparse.cases import (
    BLOCKS,
    F16,
    F32,
    GATES,
    MODES,
    check,
    exact,
    layout_of,
    operands,
    product,
)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("mode", MODES)
def test_gradients(mode, dtype, block, seed):
    layout = layout_of(block, heads=2)
    for of_a, of_b in ((False, False), (True, False), (False, True), (True, True)):
        given = operands(mode, layout, 40, dtype, (), of_a, of_b)
        a, b = (t.nan_to_num(0.0).requires_grad_() for t in given)
        y = kl.run_kernel(product(mode, of_a, of_b), layout, a, b)
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, (a, b), grad)
        wide = [t.detach().double().requires_grad_() for t in (a, b)]
        wanted = torch.autograd.grad(
            exact(mode, layout, *wide, of_a, of_b), wide, grad.double(), allow_unused=True
        )
        for ours, theirs in zip(found, wanted, strict=True):
            check(ours, theirs, 2 * GATES[dtype])


def test_gradients_of_gradients(seed):
    layout = layout_of((16, 16), (2, 3))
    for mode in MODES:
        a, b = (t.nan_to_num(0.0).double().requires_grad_() for t in operands(mode, layout, 3, F32))
        call = lambda a, b, mode=mode: kl.run_kernel(product(mode), layout, a, b)  # noqa: E731
        assert torch.autograd.gradcheck(call, (a, b), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, (a, b), fast_mode=True)
