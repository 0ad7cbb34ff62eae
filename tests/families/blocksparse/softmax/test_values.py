"""Values of block-sparse softmax against the formula in float64, on the CPU."""

import pytest
import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.functions import softmax
from tests.families.blocksparse.softmax.cases import (
    GATES,
    chance,
    check,
    dense,
    formula,
    layout,
    values,
)
from tests.families.blocksparse.softmax.options import NAMES, option_values

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
BLOCKS = (16, 32, 64, 128, (16, 64), (128, 32))
LOWEST = -torch.inf


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
def test_values_are_right(block, dtype, seed):
    made = layout(chance(2, 3, 4), block)
    x = values(made, 2, dtype=dtype)
    check(made, softmax(x, made, 0.4), formula(made, x, 0.4), GATES[dtype])


@pytest.mark.parametrize("option", NAMES)
@pytest.mark.parametrize("dtype", [F64, F16], ids=str)
def test_options_are_right(option, dtype, seed):
    made = layout(chance(2, 4, 5), (32, 16))
    x = values(made, 3, dtype=dtype)
    given = option_values(made, dtype)[option]
    check(made, softmax(x, made, 1.7, **given), formula(made, x, 1.7, **given), 2 * GATES[dtype])


def test_no_heads_several_batches_and_none(seed):
    made = layout(chance(3, 4), 16)
    for batch in ((), (2,), (2, 3), (1, 2, 2)):
        x, rpe = values(made, *batch), dense(made, *batch[-1:])
        key = torch.randn(*batch[-1:], made.shape[1], dtype=F64)
        wanted = formula(made, x, rpe=rpe, key_padding_mask=key)
        check(made, softmax(x, made, rpe=rpe, key_padding_mask=key), wanted, 1e-14)


def test_rows_that_nothing_is_left_of_are_0():
    made = layout([[0, 0, 0], [1, 0, 1]], 16)
    x = torch.randn(made.capacity, 16, 16)
    attn = torch.ones(made.shape)
    attn[20] = 0
    for given in (
        {"attn_mask": attn, "attn_mask_mode": "mul"},
        {"attn_mask": attn.bool()},
        {"attn_mask": torch.where(attn == 0, LOWEST, 0.0)},
    ):
        y = made.to_dense(softmax(x, made, **given))
        assert not y[:16].any() and not y[20].any()
        torch.testing.assert_close(y.sum(-1)[21:], torch.ones(11))


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_infinities_and_nan_are_as_in_torch(value, seed):
    made = layout([[1, 1], [1, 1]], 16, 0)
    x = values(made)
    x[0, 3, 5] = value
    y, wanted = made.to_dense(softmax(x, made)), torch.softmax(made.to_dense(x), -1)
    torch.testing.assert_close(y, wanted, equal_nan=True)
    assert y.isnan().any(-1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_left_out_does_not_count(value, seed):
    made = layout([[1, 1]], 16)
    x, keep = values(made, 1), torch.ones(1, 32, dtype=torch.bool)
    wanted = made.to_dense(softmax(x[..., :1, :, :], Layout([[1]], 16)).expand(1, 4, 16, 16))
    x[:, 1], keep[:, 16:] = value, False
    for given in (
        {"key_padding_mask": keep},
        {"key_padding_mask": keep.double(), "key_padding_mask_mode": "mul"},
        {"attn_mask": keep.expand(16, 32)},
        {"causal": True},
    ):
        y = made.to_dense(softmax(x, made, **given))
        assert not y[..., 16:].any() and y.isfinite().all()
        if "causal" not in given:
            torch.testing.assert_close(y[..., :16], wanted[..., :16])


def test_a_long_row(seed):
    made = layout(torch.ones(1, 256), (16, 128), 1)
    x = values(made, dtype=F32)
    check(made, softmax(x, made), formula(made, x), 1e-6)


def test_what_no_block_is_stored_of(seed):
    for mask in (torch.zeros(2, 3, 4), torch.zeros(0, 4), torch.zeros(3, 0)):
        for spare in (0, 3):
            made = layout(mask, 32, spare)
            x = values(made, 2, grad=True)
            y = softmax(x, made, rpe=dense(made))
            assert y.shape == x.shape and not y.any()
            assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_out_may_be_x(seed):
    made = layout(chance(3, 4), 16)
    x = values(made, 2, dtype=F32)
    before, wanted = x.clone(), softmax(x, made, 2.0)
    assert torch.equal(x, before)
    out = torch.full((2, 2 * made.capacity, 16, 16), 7.0)[:, ::2].mT
    assert softmax(x, made, 2.0, out=out) is out
    assert torch.equal(out, wanted)
    version = x._version
    assert softmax(x, made, 2.0, out=x) is x and x._version > version
    assert torch.equal(x, wanted)


def test_any_strides(seed):
    made = layout(chance(2, 3, 4), (16, 32))
    x, rpe = values(made, 2), dense(made, 2)
    turned = x.mT.contiguous().mT
    padded = torch.zeros(2, 2, 48, 129, dtype=F64)[..., 1:].copy_(rpe)
    key = torch.randn(128, 2, dtype=F64).T
    wanted = formula(made, x, rpe=rpe, key_padding_mask=key)
    check(made, softmax(turned, made, rpe=padded, key_padding_mask=key), wanted, 1e-14)


@pytest.mark.parametrize("scale", [2, True + 0.5, torch.tensor(1.5), torch.tensor(3)])
def test_scales(scale, seed):
    made = layout(chance(3, 4), 16)
    x = values(made)
    check(made, softmax(x, made, scale), formula(made, x, float(scale)), 1e-14)


def test_contents_change(seed):
    made = layout(torch.ones(3, 4), 16, 0)
    for _ in range(2):
        x = values(made, dtype=F32)
        check(made, softmax(x, made, causal=True), formula(made, x, causal=True), 1e-6)
        made.update_(chance(3, 4))


def test_autocast_casts_what_stands_beside_x(seed):
    made = layout(chance(3, 4), 16)
    x, rpe = values(made, dtype=BF16), dense(made, dtype=F32)
    with torch.autocast("cpu", BF16):
        y = softmax(x, made, rpe=rpe)
    assert y.dtype == BF16
    assert torch.equal(y, softmax(x, made, rpe=rpe.to(BF16)))


@pytest.mark.parametrize("mask", [True, False])
def test_a_mask_without_dimensions_is_one_for_all(mask, seed):
    made = layout(chance(2, 3, 4), 16)
    x, whole = values(made, 2), torch.full(made.shape[1:], mask)
    found = softmax(x, made, key_padding_mask=torch.tensor(mask))
    assert torch.equal(found, softmax(x, made, key_padding_mask=whole))
