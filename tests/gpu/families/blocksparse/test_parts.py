"""Products whose sums several blocks of threads share, on small odd layouts, where that does not
pay, and where it does."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.kernels import parts
from kernlib.lowering import kernel
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.blocksparse import cases
from tests.gpu.families.blocksparse.cases import (
    GATES,
    MODES,
    TYPES,
    check,
    exact,
    layout_of,
    operands,
    product,
)
from tests.gpu.watched import capture

BLOCKS = ((16, 16), (64, 64), (16, 64), (128, 32))
SIZES = {"sdd": (1033, 1100), "dsd": (33, 264), "dds": (33, 264)}  # a part has four stages
every_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def in_parts(monkeypatch):
    """As if it paid to have so many parts."""

    def set_count(count: int) -> None:
        monkeypatch.setattr(kernel, "choose", partial(cases.in_parts, count))
        forget_plans()

    yield set_count
    forget_plans()


@every_mode
@pytest.mark.parametrize("block", cases.BLOCKS, ids=str)
@pytest.mark.parametrize("numbers", TYPES)
def test_products_by_rule(numbers, block, mode, seed):
    """All transposes, of sums that are shared and of others."""
    sizes = (9, 72, 2056) if mode == "sdd" else (1, 24, 200)
    cases.check_products(mode, layout_of(block, (5, 13), heads=2), sizes, TYPES[numbers])


@every_mode
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("count", [2, 8])
def test_products(count, numbers, block, mode, in_parts, kinds, seed):
    """Heads, a batch, sizes that no copy runs along, parts that have no block, lines without one;
    the same bits each time."""
    in_parts(count)
    layout = layout_of(block, (9, 11), heads=2, density=0.2)
    flags = ((False, False), (True, True))
    cases.check_products(mode, layout, SIZES[mode], TYPES[numbers], flags)
    assert parts.PARTS.name in kinds


@every_mode
@pytest.mark.parametrize("numbers", ["fp16", "fp32"])
def test_epilogues(numbers, mode, in_parts, kinds, seed):
    """Finish the whole sums, and may add what the result held."""
    in_parts(4)
    dtype, layout = TYPES[numbers], layout_of((32, 32), (9, 11), heads=2, density=0.3)
    a, b = operands(mode, layout, 600 if mode == "sdd" else 200, dtype, (2,))
    wanted = torch.nn.functional.gelu(exact(mode, layout, a, b) / 4)
    one = torch.ones(2, *layout.shape).cuda()
    stored = layout.to_blocks(one) if mode == "sdd" else 1.0
    y = torch.randn(wanted.shape, device="cuda").to(dtype)
    descriptor = product(mode, epilogue=(kl.Scale(), kl.Gelu(), kl.Add()))
    wanted = wanted + stored * y.double() / 2
    kl.run_kernel(descriptor, layout, a, b, out=y, scale=0.25, beta=0.5, y=y)
    check(y, wanted, 2 * GATES[dtype])
    assert parts.PARTS.name in kinds


@pytest.mark.parametrize("numbers", ["fp16", "fp32"])
def test_long_sums_of_few_blocks_are_shared(numbers, kinds, seed):
    """By rule; with changing contents, in a graph too."""
    dtype, layout = TYPES[numbers], layout_of((32, 32), (6, 5), density=0.3, room=9)
    a, b = operands("sdd", layout, 5000, dtype)
    descriptor = product("sdd")
    found = kl.run_kernel(descriptor, layout, a, b)
    assert parts.PARTS.name in kinds
    check(found, exact("sdd", layout, a, b), GATES[dtype])
    with capture() as graph:
        kl.run_kernel(descriptor, layout, a, b, out=found)
    layout.update_(layout.mask().roll(1, 1))
    a.copy_(torch.randn_like(a))
    graph.replay()
    check(found, exact("sdd", layout, a, b), GATES[dtype])


@pytest.mark.parametrize("numbers", ["fp16", "fp32"])
def test_positive_sums_of_parts_do_not_drift(numbers, in_parts, kinds, seed):
    in_parts(8)
    dtype, layout = TYPES[numbers], layout_of((64, 64), (4, 64), density=0.9)
    values, b = (t.abs() for t in operands("dsd", layout, 72, dtype))
    found = kl.run_kernel(product("dsd"), layout, values, b)
    check(found, exact("dsd", layout, values, b), GATES[dtype])
    assert parts.PARTS.name in kinds
