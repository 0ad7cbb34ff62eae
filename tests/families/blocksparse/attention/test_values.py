"""Values of block-sparse attention against the formula in float64, on the CPU."""

import pytest
import torch

from kernlib.families.blocksparse.attention import pieces
from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.layout import Layout
from tests.families.blocksparse.attention.cases import (
    BF16,
    F16,
    F32,
    F64,
    GATES,
    LOWEST,
    Shape,
    check,
    formula,
)
from tests.families.blocksparse.attention.options import NAMES, option

SHAPE = Shape()
BLOCKS = ((16, 16), (32, 64), (64, 32), (128, 16))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
def test_values_are_right(block, dtype, seed):
    shape = SHAPE._replace(block=block)
    made, tensors = shape.layout(density=0.3), shape.tensors(dtype)
    out, lse = attention(*tensors, made, return_lse=True)
    wanted, logs = formula(*tensors, made)
    assert out.dtype == dtype and lse.dtype == (F64 if dtype == F64 else F32)
    check(out, wanted, GATES[dtype])
    check(lse, logs, max(GATES[dtype] / 100, 1e-13) if dtype in (F16, BF16) else GATES[dtype])


@pytest.mark.few(100)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("density", [0.25, 1.0])
def test_options_are_right(name, density, seed):
    """By pieces of what is stored, and by all columns."""
    given = option(name, SHAPE)
    for heads, kv_heads in ((None, 1), (SHAPE.heads, 2), (SHAPE.batch * SHAPE.heads, 4)):
        shape = SHAPE._replace(kv_heads=kv_heads)
        made, tensors = shape.layout(heads, density), shape.tensors()
        found = attention(*tensors, made, return_lse=True, **given.call)
        for ours, theirs in zip(found, formula(*tensors, made, **given.formula), strict=True):
            check(ours, theirs, GATES[F64])


def test_pieces_may_be_small(monkeypatch, seed):
    monkeypatch.setattr(pieces, "MOST", 100)
    given = option("score and mask", SHAPE)
    for heads, density in ((None, 0.3), (8, 0.3), (4, 1.0)):
        made, tensors = SHAPE.layout(heads, density), SHAPE.tensors()
        found = attention(*tensors, made, **given.call)
        check(found, formula(*tensors, made, **given.formula)[0], GATES[F64])


def test_what_nothing_is_left_of(seed):
    for mask in (torch.zeros(4, 3).bool(), torch.zeros(8, 4, 3).bool()):
        made = Layout(mask, SHAPE.block, 2)
        tensors = SHAPE.tensors(grad=True)
        out, lse = attention(*tensors, made, return_lse=True)
        assert not out.any() and (lse == LOWEST).all()
        found = torch.autograd.grad((out.sum(), lse.sum()), tensors)
        assert not any(t.any() for t in found)


@pytest.mark.parametrize("change", [{"queries": 0}, {"keys": 0}, {"batch": 0}, {"values": 0}])
def test_sizes_of_zero(change):
    shape = SHAPE._replace(**change)
    made, tensors = shape.dense(), shape.tensors(grad=True)
    out, lse = attention(*tensors, made, return_lse=True)
    assert out.shape == (shape.batch, shape.heads, shape.queries, shape.values)
    assert not out.any() and lse.shape == out.shape[:3]
    assert all(not t.any() for t in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_left_out_does_not_count(value, seed):
    """Padded rows and keys, and keys whose block is not stored, whatever they hold."""
    made = Layout([[1, 0, 1], [1, 0, 1], [1, 0, 1], [1, 0, 1]], SHAPE.block)
    lengths = {"q_lengths": torch.tensor([50, 20]), "kv_lengths": torch.tensor([66, 20])}
    q, k, v = SHAPE.tensors()
    wanted = attention(q, k, v, made, return_lse=True, **lengths)
    q[1, :, 20:] = value
    for t in (k, v):
        t[0, :, 66:], t[1, :, 20:], t[:, :, 32:64] = value, value, value
    leaves = [t.requires_grad_() for t in (q, k, v)]
    found = attention(*leaves, made, return_lse=True, **lengths)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    finite = torch.where(found[1] == LOWEST, 0.0, found[1])
    for t in torch.autograd.grad((found[0].sum(), finite.sum()), leaves):
        assert t.isfinite().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_infinities_and_nan_are_as_in_torch(value, seed):
    made, (q, k, v) = SHAPE.dense(), SHAPE.tensors()
    q[0, 1, 7, 2] = value
    out, lse = attention(q, k, v, made, return_lse=True)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 1, 7]]
    assert lse.isnan().nonzero().tolist() == [[0, 1, 7]]


def test_large_logits(seed):
    made, (q, k, v) = SHAPE.layout(), SHAPE.tensors()
    q = q * 1e4
    for ours, theirs in zip(
        attention(q, k, v, made, return_lse=True), formula(q, k, v, made), strict=True
    ):
        check(ours, theirs, 1e-10)


def test_any_strides(seed):
    made, tensors = SHAPE.layout(), SHAPE.tensors()
    turned = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    across = tuple(t.mT.contiguous().mT for t in tensors)
    wanted, _ = formula(*tensors, made)
    for given in (turned, across):
        out = attention(*given, made)
        assert out.is_contiguous()
        check(out, wanted, GATES[F64])


def test_out(seed):
    made, tensors = SHAPE.layout(), SHAPE.tensors(F32)
    wanted = attention(*tensors, made)
    out = torch.full((2, 50, 4, 10), 7.0).transpose(1, 2)[..., ::2]
    version = out._version
    assert attention(*tensors, made, out=out) is out and out._version > version
    assert torch.equal(out, wanted)
    pair = attention(*tensors, made, out=out, return_lse=True)
    assert pair[0] is out


def test_contents_change(seed):
    made, tensors = SHAPE.layout(spare=20), SHAPE.tensors()
    for _ in range(2):
        check(attention(*tensors, made), formula(*tensors, made)[0], GATES[F64])
        made.update_(torch.rand(SHAPE.grid) < 0.5)


def test_autocast_casts_queries_keys_and_values(seed):
    made, (q, k, v) = SHAPE.layout(), SHAPE.tensors(F32)
    with torch.autocast("cpu", BF16):
        out = attention(q, k.to(BF16), v, made)
    assert out.dtype == BF16
    assert torch.equal(out, attention(q.to(BF16), k.to(BF16), v.to(BF16), made))
    with torch.autocast("cpu", BF16):
        assert attention(q.double(), k.double(), v.double(), made).dtype == F64


def test_dropout_keeps_its_share(seed):
    shape = Shape(2, 2, 2, 256, 256, 8, 8, (64, 64))
    q, k, v = shape.tensors(F32)
    made, ones = shape.dense(), torch.eye(256)[None, None].expand(2, 2, -1, -1)
    weights = attention(q, k, ones, made)
    dropped = attention(q, k, ones, made, dropout_p=0.25, seed=3)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert abs(float(kept.float().mean()) - 0.75) < 0.01
    again = attention(q, k, ones, made, dropout_p=0.25, seed=3)
    other = attention(q, k, ones, made, dropout_p=0.25, seed=4)
    assert torch.equal(dropped, again) and not torch.equal(dropped, other)
    torch.manual_seed(5)
    drawn = attention(q, k, v, made, dropout_p=0.25)
    assert not torch.equal(drawn, attention(q, k, v, made, dropout_p=0.25))
    torch.manual_seed(5)
    assert torch.equal(drawn, attention(q, k, v, made, dropout_p=0.25))
