"""Values on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, dds, dsd, sdd
from kernlib.families.blocksparse.kernels.sdd.sampled_hopper import SampledHopper
from kernlib.families.blocksparse.kernels.spmm.hopper import Hopper
from kernlib.families.blocksparse.kernels.spmm.narrow import Narrow
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.blocksparse import cases
from tests.gpu.families.blocksparse.cases import (
    BLOCKS,
    F16,
    F32,
    GATES,
    MODES,
    SHAPES_OF_LAYOUTS,
    TYPES,
    check,
    exact,
    layout_of,
    operands,
    product,
    values_of,
)

SIZES = (1, 8, 33, 64, 200, 264)  # columns, rows or depth of the dense operand
every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


@pytest.fixture(autouse=True)
def kernels_of_hopper(monkeypatch):
    """Take what they can, however small it is; test_parts.py has the same by rule."""
    monkeypatch.setattr(SampledHopper, "pays", lambda *_: True)
    for kind in (Hopper, Narrow):
        monkeypatch.setattr(kind, "pays", cases.pays_as_ever)
    forget_plans()
    yield
    forget_plans()


@every_block
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("mode", MODES)
def test_products(mode, numbers, block, seed):
    """All transposes, sizes that the copy engine takes and others, heads, values of a batch."""
    cases.check_products(mode, layout_of(block, heads=2), SIZES, TYPES[numbers])


@every_block
@pytest.mark.parametrize("numbers", ["fp16", "fp32"])
def test_a_linear_layers_product(numbers, block, seed):
    """Values without a batch, and x of further dimensions."""
    layout, dtype = layout_of(block), TYPES[numbers]
    x = torch.randn(3, 40, layout.shape[1], device="cuda").to(dtype)
    weight, bias = values_of(layout, dtype), torch.randn(layout.shape[0], device="cuda").to(dtype)
    epilogue = (kl.Bias(), kl.Gelu())
    found = dds(x, weight, layout, transpose_b=True, epilogue=epilogue, bias=bias)
    v = exact("dds", layout, x, weight, False, True) + bias.double()
    check(found, torch.nn.functional.gelu(v), 1.5 * GATES[dtype])
    grad = torch.randn_like(found).flatten(0, 1)
    of_weight = sdd(grad, x.flatten(0, 1), layout, transpose_a=True)
    check(of_weight, exact("sdd", layout, grad, x.flatten(0, 1), True), GATES[dtype])


@every_block
@pytest.mark.parametrize("mode", MODES)
def test_summands(mode, block, seed):
    layout = layout_of(block, heads=2)
    a, b = operands(mode, layout, 72, F16, (2,))
    wanted = exact(mode, layout, a, b)
    y = torch.randn(wanted.shape, device="cuda").half()
    call = {"sdd": sdd, "dsd": dsd, "dds": dds}[mode]
    given = (a, b, layout)
    stored = 1.0 if mode != "sdd" else layout.to_blocks(torch.ones(2, *layout.shape).cuda())
    for beta in (-0.5, torch.tensor(-0.5, device="cuda")):
        found = call(*given, epilogue=kl.Add(), beta=beta, y=y)
        check(found, wanted - stored * y.double() / 2, 2e-3)
    whole = y.clone()
    call(*given, epilogue=kl.Add(), beta=1.0, y=whole, out=whole)
    check(whole, wanted + stored * y.double(), 2e-3)
    nothing = torch.full_like(y, math.nan)
    check(call(*given, epilogue=kl.Add(), beta=0.0, y=nothing), wanted, 2e-3)


def test_tf32_is_what_is_permitted(seed):
    layout = layout_of((64, 64))
    values, b = operands("dsd", layout, 72, F32)
    wanted = exact("dsd", layout, values, b)
    for precision, gate in (("tf32", 2e-3), ("bf16", 2e-3), ("fp32", 1e-6)):
        check(dsd(values, b, layout, precision=precision), wanted, gate)


@every_block
@pytest.mark.parametrize("numbers", TYPES)
def test_what_no_block_meets_reaches_no_result(numbers, block, seed):
    layout, dtype = layout_of(block), TYPES[numbers]
    values, b = operands("dsd", layout, 72, dtype)
    free = ~layout.mask().any(0)  # columns of blocks that no line stores
    if not free.any():
        pytest.skip("each column stores a block")
    rows = free.repeat_interleave(block[1])
    wanted = exact("dsd", layout, values, b)
    b[rows] = math.nan
    check(dsd(values, b, layout), wanted, GATES[dtype])


@every_block
def test_columns_are_independent(block, seed):
    """A column's bits depend on nothing else: not on how many there are."""
    layout = layout_of(block)
    values, b = operands("dsd", layout, 264, F16)
    found = dsd(values, b, layout)
    b[:, 5] = math.nan
    again = dsd(values, b, layout)
    kept = [index for index in range(264) if index != 5]
    assert torch.equal(again[:, kept], found[:, kept])


@every_block
def test_strides_of_all_kinds(block, seed):
    layout = layout_of(block)
    values, b = operands("dsd", layout, 40, F16)
    wanted = exact("dsd", layout, values, b)
    wide = torch.randn(b.shape[0], 45, device="cuda").half()
    wide[:, 2:42] = b
    odd = values.mT.contiguous().mT
    for v in (values, odd, values[None].expand(3, *values.shape)[1]):
        for dense in (b, b.mT.contiguous().mT, wide[:, 2:42]):
            check(dsd(v, dense, layout), wanted, 1e-3)
    out = torch.empty(40, layout.shape[0], device="cuda").half().mT
    dsd(values, b, layout, out=out)
    check(out, wanted, 1e-3)


def test_layouts_without_blocks(seed):
    for heads in (None, 2):
        lead = () if heads is None else (heads,)
        mask = torch.zeros(*lead, 3, 4, dtype=torch.bool)
        for capacity in (0, 5):
            layout = Layout(mask, 32, capacity=capacity, device="cuda")
            values = torch.full((capacity, 32, 32), math.nan, device="cuda").half()
            b = torch.randn(*lead, 128, 40, device="cuda").half()
            assert not dsd(values, b, layout).any()
            made = sdd(b[..., :96, :], b.mT, layout)
            assert made.shape == (capacity, 32, 32) and not made.any()


def test_positive_sums_do_not_drift(seed):
    """A tensor core's additions truncate."""
    layout = layout_of((64, 64), (4, 64), density=0.9)
    values, b = (t.abs() for t in operands("dsd", layout, 72, F32))
    check(dsd(values, b, layout), exact("dsd", layout, values, b), 1e-6)


def test_more_elements_than_31_bits_count(seed):
    rows = 2**31 // 4096 + 5
    layout = layout_of((64, 64), (64, 64), density=0.05)
    x = torch.randn(rows, 4096, device="cuda", dtype=F16)
    weight = values_of(layout, F16)
    found = dds(x, weight, layout, transpose_b=True)
    for part in (slice(0, 3), slice(rows - 3, rows)):
        check(found[part], exact("dds", layout, x[part], weight, False, True), 1e-3)


@every_block
@pytest.mark.parametrize("name", SHAPES_OF_LAYOUTS)
def test_layouts_of_all_shapes(name, block, seed):
    """Rows of very different lengths, of few blocks and of none; the same bits each time."""
    layout = Layout(SHAPES_OF_LAYOUTS[name], block, device="cuda")
    for mode in MODES:
        for of_s in (False, True):
            flags = {"sdd": (False, of_s), "dsd": (of_s, False), "dds": (False, of_s)}[mode]
            for size in (16, 48, 80, 96):
                a, b = operands(mode, layout, size, F16, (), *flags)
                found = kl.run_kernel(product(mode, *flags), layout, a, b)
                check(found, exact(mode, layout, a, b, *flags), GATES[F16])
                assert torch.equal(kl.run_kernel(product(mode, *flags), layout, a, b), found)


def test_more_stored_elements_than_31_bits_count(seed):
    """262,144 blocks of 128 x 128: 8.6 GB of values, made and multiplied."""
    layout = Layout(torch.ones(512, 512, dtype=torch.bool), 128, device="cuda")
    a, b = (torch.randn(65536, 16, device="cuda").half() for _ in range(2))
    values = sdd(a, b, layout, transpose_b=True)
    for slot in (0, 131071, 131072, 262143):
        row, col = (128 * index for index in divmod(slot, 512))
        wanted = a[row : row + 128].double() @ b[col : col + 128].double().mT
        check(values[slot], wanted, GATES[F16])
    x = torch.randn(65536, 8, device="cuda").half()
    y = dsd(values, x, layout)
    for line in (0, 32767, 32768, 65535):
        block, row = divmod(line, 128)
        whole = values[512 * block : 512 * block + 512, row].double().flatten()
        check(y[line], whole @ x.double(), 2 * GATES[F16])
