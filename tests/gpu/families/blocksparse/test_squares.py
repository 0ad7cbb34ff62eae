"""The kernels of sdd for square blocks, with rows that stay in registers and of whole tiles, on
small layouts of all kinds, where they do not pay, and where they do."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, sdd
from kernlib.families.blocksparse.kernels.sdd.stationary import Stationary
from kernlib.families.blocksparse.kernels.sdd.tiles import Tiles
from kernlib.families.blocksparse.lowering import hopper
from kernlib.runtime.devices import arch_of
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.blocksparse import cases
from tests.gpu.families.blocksparse.cases import (
    F16,
    GATES,
    TYPES,
    check,
    exact,
    layout_of,
    operands,
    product,
)

# No other test has these grids, so that no plan by another kernel is kept for them. Two groups of
# rows of which one is not whole, and more panels than stages, of which one is not whole.
GRIDS = {16: (37, 141), 32: (19, 71), 64: (11, 35)}
KINDS = {"stationary": Stationary, "tiles": Tiles}
DEPTHS = {"stationary": (8, 33, 64, 72, 128), "tiles": (8, 33, 136, 520)}
every_block = pytest.mark.parametrize("block", GRIDS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def always(monkeypatch, kind):
    """As if one kind paid, and no other."""
    for name, kernel in KINDS.items():
        monkeypatch.setattr(kernel, "pays", lambda *_, name=name: name == kind)
    forget_plans()


def is_hopper() -> bool:
    return arch_of(torch.cuda.current_device()) == hopper.ARCH


@every_kind
@every_block
@pytest.mark.parametrize("numbers", ["fp16", "bf16"])
def test_products(numbers, block, kind, always, kinds, seed):
    """All transposes, depths that are filled up, heads, batches; zeros in 40 slots that hold no
    block; the same bits each time."""
    dtype = TYPES[numbers]
    layout = layout_of((block, block), GRIDS[block], heads=2, density=0.3, room=40)
    made = [
        (pair, operands("sdd", layout, size, dtype, (2,), *pair))
        for pair in cases.FLAGS
        for size in DEPTHS[kind]
    ]
    cases.build([(product("sdd", *pair), (layout, a, b)) for pair, (a, b) in made])
    for pair, (a, b) in made:
        out = torch.full((2, layout.capacity, block, block), math.nan, device="cuda", dtype=dtype)
        kl.run_kernel(product("sdd", *pair), layout, a, b, out=out)
        check(out, exact("sdd", layout, a, b, *pair), GATES[dtype])
        assert not out[:, layout.nnz :].any()
        assert torch.equal(kl.run_kernel(product("sdd", *pair), layout, a, b), out)
    assert kinds.count(kind) >= (2 * 4 * 3 if is_hopper() else 0)  # a depth of 33 is not for all


@every_kind
@every_block
def test_epilogues(block, kind, always, kinds, seed):
    """A summand may be the result, and one that does not count may be anything. Whole tiles take
    none."""
    grid = GRIDS[block][0], GRIDS[block][1] + 1
    layout = layout_of((block, block), grid, heads=2, density=0.3, room=40)
    a, b = operands("sdd", layout, 64, F16, (2,))
    wanted = exact("sdd", layout, a, b)
    stored = layout.to_blocks(torch.ones(2, *layout.shape).cuda())
    found = sdd(a, b, layout, epilogue=(kl.Scale(), kl.Gelu()), scale=0.25)
    check(found, torch.nn.functional.gelu(wanted / 4), 1.5 * GATES[F16])
    whole = torch.randn(wanted.shape, device="cuda").half()
    wanted += stored * whole.double() / 2
    sdd(a, b, layout, epilogue=kl.Add(), beta=0.5, y=whole, out=whole)
    check(whole, wanted, 2e-3)
    nothing = torch.full_like(whole, math.nan)
    found = sdd(a, b, layout, epilogue=kl.Add(), beta=0.0, y=nothing)
    check(found, exact("sdd", layout, a, b), GATES[F16])
    assert not is_hopper() or set(kinds) >= {kind}


@every_block
@pytest.mark.parametrize(
    "kind, depth", [("stationary", 64), ("stationary", 128), ("tiles", 64), ("tiles", 328)]
)
def test_panels_that_nobody_needs(depth, block, kind, always, kinds, seed):
    """Are left out, and contents change: a band, what lies on one side of it, nothing, all."""
    rows, cols = GRIDS[block][0] + 2, GRIDS[block][1] + 2
    row, col = torch.arange(rows)[:, None], torch.arange(cols)
    masks = [(col - row).abs() < 2, col <= row, row < 0 * col, col > cols - 3 + 0 * row, col >= 0]
    masks = [mask.expand(rows, cols).clone() for mask in masks]
    layout = Layout(masks[0], block, capacity=rows * cols, device="cuda")
    a, b = operands("sdd", layout, depth, F16)
    for mask in masks:
        layout.update_(mask)
        out = torch.full((layout.capacity, block, block), math.nan, device="cuda").half()
        sdd(a, b, layout, out=out)
        assert not out[layout.nnz :].any()
        if mask.any():
            check(out, exact("sdd", layout, a, b), GATES[F16])
    assert kinds.count(kind) == (len(masks) if is_hopper() else 0)


def test_it_is_taken_for_attention_scores(kinds, seed):
    """By rule: 16 heads of 2048 queries and keys, one b for all batches."""
    for block in GRIDS:
        layout = layout_of((block, block), (2048 // block,) * 2, heads=16, density=0.3, room=0)
        q = torch.randn(2, 16, 2048, 64, device="cuda").half()
        k = torch.randn(16, 2048, 64, device="cuda").half()
        scores = sdd(q, k.expand(q.shape), layout, transpose_b=True)
        for batch in range(2):
            check(scores[batch], exact("sdd", layout, q[batch], k, False, True), GATES[F16])
    assert kinds.count("stationary") == (len(GRIDS) if is_hopper() else 0)


def test_whole_tiles_are_taken_for_gradients_of_many_blocks(kinds, seed):
    """By rule: a third to two thirds of 2048 x 2048, as gradients by values ask for."""
    for block, density in ((16, 0.35), (32, 0.5), (64, 0.7)):
        layout = layout_of((block, block), (2048 // block,) * 2, density=density, room=0)
        a, b = (torch.randn(2048, 1024, device="cuda").half() for _ in range(2))
        found = sdd(a, b, layout, transpose_b=True)
        check(found, exact("sdd", layout, a, b, False, True), GATES[F16])
    assert kinds.count("tiles") == (3 if is_hopper() else 0)
