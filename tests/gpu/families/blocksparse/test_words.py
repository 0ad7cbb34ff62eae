"""float32 products by pairs of float16 words on the GPU, small ones too, against float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, dds, dsd
from kernlib.families.blocksparse.kernels.spmm.hopper_words import HopperWords
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.blocksparse import cases
from tests.gpu.families.blocksparse.cases import (
    F32,
    SHAPES_OF_LAYOUTS,
    check,
    exact,
    layout_of,
    operands,
    product,
    values_of,
)
from tests.gpu.watched import capture
from tests.support.gpus import on_hopper

BLOCKS = ((64, 64), (128, 128), (64, 128), (128, 64))
GATE = 1e-6
SIZES = (17, 33, 72, 128, 200, 257)  # columns of the dense operand, or its rows
every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


@pytest.fixture(autouse=True)
def words(monkeypatch, kinds):
    """Whatever a test multiplies is multiplied by the kernel, where the GPU has it."""
    forget_plans()
    monkeypatch.setattr(HopperWords, "pays", lambda *_: True)
    yield
    forget_plans()
    assert not on_hopper() or HopperWords.name in kinds


def operands_of(mode: str, layout: Layout, size: int, batch=(), flags=(False, False)):
    return operands(mode, layout, size, F32, batch, *flags)


@every_block
@pytest.mark.parametrize("mode", ["dsd", "dds"])
def test_products(mode, block, seed):
    """All transposes, ragged columns, heads, values of a batch, NaN in slots without a block."""
    cases.check_products(mode, layout_of(block, heads=2), SIZES, F32)


@every_block
def test_strides_of_all_kinds(block, seed):
    layout = layout_of(block)
    values, b = operands_of("dsd", layout, 40)
    wanted = exact("dsd", layout, values, b)
    wide = torch.randn(b.shape[0], 45, device="cuda")
    wide[:, 3:43] = b
    turned = values.mT.contiguous().mT
    odd = torch.empty(values.numel() + 1, device="cuda")[1:].view(values.shape)
    odd.copy_(values)
    for v in (values, turned, odd, values[None].expand(3, *values.shape)[1]):
        for dense in (b, b.mT.contiguous().mT, wide[:, 3:43]):
            check(dsd(v, dense, layout), wanted, GATE)
    for shape in ((40, layout.shape[0]), (41, layout.shape[0] + 1)):
        out = torch.full(shape, 7.0, device="cuda")
        dsd(values, b, layout, out=out[:40, : layout.shape[0]].mT)
        check(out[:40, : layout.shape[0]].mT, wanted, GATE)
        assert (out[40:] == 7).all() and (out[:, layout.shape[0] :] == 7).all()
    rows = torch.full((layout.shape[0], 43), 7.0, device="cuda")
    dsd(values, b, layout, out=rows[:, :40])
    check(rows[:, :40], wanted, GATE)
    assert (rows[:, 40:] == 7).all()


@every_block
def test_epilogues(block, seed):
    layout = layout_of(block, heads=2)
    a, b = operands_of("dsd", layout, 72, (2,))
    wanted = exact("dsd", layout, a, b)
    y = torch.randn(wanted.shape, device="cuda")
    check(dsd(a, b, layout, epilogue=kl.Add(), beta=-0.5, y=y), wanted - y.double() / 2, GATE)
    whole = y.clone()
    dsd(a, b, layout, epilogue=kl.Add(), beta=1.0, y=whole, out=whole)
    check(whole, wanted + y.double(), GATE)
    one = layout_of(block)
    x = torch.randn(3, 40, one.shape[1], device="cuda")
    weight, bias = values_of(one, F32), torch.randn(one.shape[0], device="cuda")
    found = dds(x, weight, one, transpose_b=True, epilogue=(kl.Bias(), kl.Gelu()), bias=bias)
    v = exact("dds", one, x, weight, False, True) + bias.double()
    check(found, torch.nn.functional.gelu(v), 1.5 * GATE)


@pytest.mark.parametrize("of_values", [False, True])
def test_lines_of_any_magnitude(of_values, seed):
    """Each line and column to its own precision, from 2^-60 to 2^60."""
    layout = layout_of((64, 64), (5, 40))
    values, b = operands_of("dsd", layout, 136)
    rows = torch.exp2(torch.randint(-60, 61, (1, 64, 1), device="cuda").float())
    columns = torch.exp2(torch.randint(-60, 61, (1, 136), device="cuda").float())
    wanted = exact("dsd", layout, values.nan_to_num(0.0), b)
    if of_values:
        found = dsd(values * rows, b, layout) / rows.repeat(5, 1, 1).flatten(0, 1)
    else:
        found = dsd(values, b * columns, layout) / columns
    check(found, wanted, GATE)
    assert torch.equal(found, dsd(values, b, layout))  # powers of two change no bit


def test_small_numbers_beside_large_ones_keep_their_bits(seed):
    """Where a line has 2^-24 of its largest number a column has the largest of its own."""
    layout = layout_of((64, 64), (5, 40))
    values, b = operands_of("dsd", layout, 136)
    depth = torch.exp2(torch.randint(-12, 13, (64,), device="cuda").float())
    values *= depth
    b /= depth.repeat(40)[:, None]
    check(dsd(values, b, layout), exact("dsd", layout, values, b), GATE)


def test_positive_sums_do_not_drift(seed):
    """A tensor core's additions truncate."""
    for block, grid in (((64, 64), (4, 64)), ((128, 128), (3, 32))):
        layout = layout_of(block, grid, density=0.9)
        values, b = (t.abs() for t in operands_of("dsd", layout, 72))
        check(dsd(values, b, layout), exact("dsd", layout, values, b), GATE)


@every_block
def test_what_is_not_finite_stays_in_its_line_and_column(block, seed):
    """And is what float64 makes of it, of integers that are one word each; NaN by other kernels,
    whose split of a number into two of TF32 has no infinities."""
    layout = Layout([[1, 1], [1, 1]], block, device="cuda")
    values = torch.randint(-3, 4, (4, *block), device="cuda").float()
    b = torch.randint(1, 4, (2 * block[1], 40), device="cuda").float()
    values[0, 3, 5], values[1, 7, 9], values[2, 20, 0] = math.inf, -math.inf, math.nan
    b[5, 4], b[5, 5], b[70, 6], b[100, 8] = 0, -math.inf, math.nan, math.inf
    wanted, found = exact("dsd", layout, values, b), dsd(values, b, layout).double()
    if not on_hopper():
        wanted = wanted.where(wanted.isfinite(), math.nan)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0.0, 1e30, -1e30), wanted.nan_to_num(0.0, 1e30, -1e30))


@every_block
def test_what_no_block_meets_reaches_no_result(block, seed):
    """Neither NaN nor what is so large that the others would be nothing beside it."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, 1] = False
    layout = Layout(mask, block, device="cuda")
    values, b = operands_of("dsd", layout, 72)
    wanted = exact("dsd", layout, values, b)
    for strange in (math.nan, math.inf, 1e30):
        b[block[1] : 2 * block[1]] = strange
        check(dsd(values, b, layout), wanted, GATE)


@every_block
def test_columns_and_batches_are_independent(block, seed):
    layout = layout_of(block, heads=2)
    values, b = operands_of("dsd", layout, 264, (3,))
    found = dsd(values, b, layout)
    for index in range(3):
        assert torch.equal(dsd(values[index], b[index], layout), found[index])
    assert torch.equal(dsd(values, b[..., :40], layout), found[..., :40])


@every_block
@pytest.mark.parametrize("name", SHAPES_OF_LAYOUTS)
def test_layouts_of_all_shapes(name, block, seed):
    layout = Layout(SHAPES_OF_LAYOUTS[name], block, device="cuda")
    for mode, flags in (("dsd", (False, False)), ("dsd", (True, False)), ("dds", (False, True))):
        for size in (48, 96, 3000):
            a, b = operands_of(mode, layout, size, (), flags)
            found = kl.run_kernel(product(mode, *flags), layout, a, b)
            check(found, exact(mode, layout, a, b, *flags), GATE)
            assert torch.equal(kl.run_kernel(product(mode, *flags), layout, a, b), found)


def test_a_layout_may_change_between_replays(seed):
    layout = layout_of((64, 64), room=60)
    values, b = operands_of("dsd", layout, 72)
    values = values.nan_to_num(0.0)
    descriptor = product("dsd")
    kl.prepare(descriptor, layout, values, b)
    mask = layout.mask()
    layout.update_(mask)
    kl.run_kernel(descriptor, layout, values, b)
    with capture() as graph:
        layout.update_(mask)
        found = kl.run_kernel(descriptor, layout, values, b)
    for _ in range(3):
        mask.copy_(torch.rand(mask.shape, device="cuda") < 0.4)
        values.normal_()
        b.normal_()
        graph.replay()
        check(found, exact("dsd", layout, values, b), GATE)


@pytest.mark.parametrize("block", [64, 128])
def test_at_full_size_it_is_as_precise_as_cublas(block, seed):
    """4096 in all dimensions, and calls one after the other that share a workspace."""
    layout = layout_of((block, block), (4096 // block,) * 2, density=0.25, room=7)
    values, b = operands_of("dsd", layout, 4096)
    wanted = exact("dsd", layout, values, b)
    found = [dsd(values, b, layout, precision="fp32") for _ in range(3)]
    stored = layout.to_dense(values)
    bar = ((stored @ b).double() - wanted).norm()
    for each in found:
        assert torch.equal(each, found[0])
    assert (found[0].double() - wanted).norm() <= 1.5 * bar
    check(found[0], wanted, GATE)


def test_more_stored_elements_than_31_bits_count(seed):
    """131,200 blocks of 128 x 128: 8.6 GB, and as much again of words."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("takes 20 GB")
    layout = Layout(torch.ones(328, 400, dtype=torch.bool), 128, capacity=131200, device="cuda")
    values = torch.randn(131200, 128, 128, device="cuda")
    x = torch.randn(400 * 128, 24, device="cuda")
    y = dsd(values, x, layout)
    for block in (0, 163, 164, 327):
        whole = values[400 * block : 400 * block + 400, 77].double().flatten()
        check(y[128 * block + 77], whole @ x.double(), 2 * GATE)
