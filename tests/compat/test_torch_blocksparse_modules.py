"""Torch-Blocksparse's modules under their names: attention, layers, and what swaps them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from kernlib.compat import torch_blocksparse as compat
from kernlib.families.blocksparse.layout import Layout
from kernlib.nn.block_sparse.linear import BlockSparseLinear
from tests.compat.blocksparse_cases import DOUBLE, HALF, blocks_of, close, random_layout


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def test_attention():
    info = compat.MultiheadAttention.SparsityInfo()
    info.mode, info.block = "dense", 16
    torch.manual_seed(0)
    sparse = compat.MultiheadAttention(128, 2, info).half()
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(128, 2)
    query, key, value = (torch.rand(128, 2, 128).half() for _ in range(3))
    dropped = torch.rand(2, 128) > 0.5
    added = torch.zeros(2, 128, dtype=HALF).masked_fill(dropped, -torch.inf)
    y, weights = sparse(query, key, value, key_padding_mask=added, need_weights=False)
    wanted, _ = dense(query.float(), key.float(), value.float(), key_padding_mask=dropped)
    assert weights is None
    close(y, wanted.half())


def test_attention_of_a_layout_and_its_block():
    layout = random_layout(2, 4, 4)
    x = torch.rand(64, 3, 32)
    found = []
    for given, named in (
        ((Layout(layout, 16), 0.0, False), {}),
        ((layout, 16, 0.0, False), {}),
        ((layout, 16), {"bias": False}),
        ((), {"layout": layout, "block": 16, "bias": False}),
    ):
        torch.manual_seed(0)
        found.append(compat.MultiheadAttention(32, 2, *given, **named)(x, x, x)[0])
    assert all(torch.equal(each, found[0]) for each in found)


def relu_case(shape: tuple, dtype) -> None:
    x, residual, grad = (torch.randn(shape, dtype=dtype) for _ in range(3))
    scale, bias = torch.randn(1, dtype=dtype), torch.randn(1, dtype=dtype)
    given = [t.requires_grad_() for t in (x, scale, bias, residual)]
    y = compat.ReLU()(*given)
    wanted = torch.relu(x * scale + bias + residual)
    close(y, wanted)
    for one, other in zip(
        torch.autograd.grad(y, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-2) and one.shape == other.shape


def test_relu():
    relu_case((4, 64, 15, 15), torch.float32)
    given = [torch.randn(2, 3, dtype=DOUBLE), *torch.randn(2, 1, dtype=DOUBLE), torch.randn(2, 3)]
    given = [t.double().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(compat.ReLU(), given)


ORDERS = {"NCHW": lambda n, c, h, w: (c * h * w, h * w, w, 1),
          "CHWN": lambda n, c, h, w: (1, h * w * n, w * n, n)}  # fmt: skip


@pytest.mark.parametrize("out_order", ORDERS)
@pytest.mark.parametrize("in_order", ORDERS)
def test_permute(in_order, out_order):
    shape = (32, 32, 4, 4)
    x = torch.rand(32 * 32 * 16).as_strided(shape, ORDERS[in_order](*shape)).requires_grad_()
    y = compat.Permute(in_order, out_order)(x)
    assert torch.equal(y, x) and y.stride() == ORDERS[out_order](*shape)
    assert y.data_ptr() != x.data_ptr()
    grad = torch.rand(shape)
    (found,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(found, grad) and found.stride() == ORDERS[in_order](*shape)
    small = torch.rand(2, 3, 2, 2, dtype=DOUBLE, requires_grad=True)
    made = compat.Permute(in_order, out_order)
    assert torch.autograd.gradgradcheck(made, small)
    assert torch.autograd.gradcheck(made, small, check_forward_ad=True, check_batched_grad=True)
    several = torch.stack((small, 2 * small)).detach()
    assert torch.equal(torch.vmap(made)(several), several)


def test_modules_of_one_length_and_two_layouts():
    x = torch.rand(64, 1, 32)
    found = []
    for mode in ("dense", "fixed", "dense"):
        torch.manual_seed(0)
        info = compat.SparsityInfo(mode, 16, 32)
        found.append(compat.MultiheadAttention(32, 2, info)(x, x, x)[0])
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


def test_fixed_layouts():
    ragged = compat.make_layout(2, 6, "fixed", 4, True, 1, 1)
    assert ragged.shape == (2, 6, 6) and ragged.dtype == torch.int64
    assert not ragged.triu(1).any()
    wide = compat.make_layout(1, 8, "fixed", 4, True, 1, 4)
    assert torch.equal(wide[0], torch.ones(8, 8).tril().long())
    with pytest.raises(ValueError, match="stride must be a multiple of the block"):
        compat.SparsityInfo("fixed", 32, 48).layout(1, 64, 64)


def test_linear_works():
    layout = random_layout(1, 2, 3, 0.7)
    layout[0, 0] = 1
    made = compat.Linear(32, 48, 16, layout, bias=True)
    assert made.weight.shape == (int(layout.sum()), 16, 16)
    assert list(made.state_dict()) == ["weight", "bias"]
    x = torch.rand(4, 32, requires_grad=True)
    assert torch.allclose(made(x), x @ made.to_dense() + made.bias, atol=1e-6)
    assert made(x[0]).shape == (48,) and made(x[None, None]).shape == (1, 1, 4, 48)
    close(blocks_of(made.to_dense()[None, None], layout, 16)[0].detach(), made.weight.detach())
    turned = BlockSparseLinear(32, 48, Layout(layout[0].T, 16))
    with torch.no_grad():
        turned.weight.copy_(turned.layout.to_blocks(made.to_dense().mT))
        turned.bias.copy_(made.bias)
    assert torch.allclose(turned(x), made(x), atol=1e-6)
    made(x).square().sum().backward()
    assert made.weight.grad.any() and x.grad.any()
    other = compat.BlockSparseLinear(32, 48, 16, layout, bias=True)
    other.load_state_dict(made.state_dict())
    for one in (other, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(one(x), made(x))
    assert made.watch_growth()(x).sum().backward() is None and made.growth_gradient is not None


def test_modules_are_replaced():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x = torch.rand(3, 64, 32, dtype=DOUBLE)
    dropped = torch.arange(64) >= torch.tensor([[64], [40], [9]])
    wanted = model(x, src_key_padding_mask=dropped)
    compat.replace_mha(model, compat.SparsityInfo("dense", 16))
    layers = [layer.self_attn for layer in model.layers]
    assert all(type(m) is compat.MultiheadAttention for m in layers)
    assert not any(m.training for m in layers)
    assert torch.allclose(model(x, src_key_padding_mask=dropped), wanted)
    with torch.no_grad():  # where torch would nest what is padded
        assert torch.allclose(model(x, src_key_padding_mask=dropped), wanted)
    with pytest.raises(TypeError, match="in no place to be swapped"):
        compat.replace_mha(nn.MultiheadAttention(32, 2), None)
    dropping = nn.TransformerEncoderLayer(32, 2, 48, 0.1)
    compat.replace_mha(dropping, compat.SparsityInfo("dense", 16))
    assert dropping.self_attn.dropout == 0.1
    adding = nn.Sequential(nn.MultiheadAttention(32, 2, add_zero_attn=True))
    with pytest.raises(NotImplementedError, match="add_zero_attn"):
        compat.replace_mha(adding, compat.SparsityInfo("dense", 16))
    assert type(adding[0]) is nn.MultiheadAttention
    shared = nn.Sequential(*[nn.MultiheadAttention(32, 2)] * 2)
    compat.replace_mha(shared, compat.SparsityInfo("dense", 16))
    assert type(shared[1]) is compat.MultiheadAttention and shared[0] is shared[1]


@pytest.mark.parametrize("key", ("plain", "transposed"))
def test_deepspeeds_attention(key):
    q, k, v = (torch.rand(2, 3, 64, 8, dtype=DOUBLE) for _ in range(3))
    op = compat.DeepSpeedSparseSelfAttention(24, 3, "dense", 32)
    wanted = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
    assert torch.allclose(op(q, k.mT.contiguous() if key == "transposed" else k, v), wanted)
    fixed = compat.DeepSpeedSparseSelfAttention(24, 3, stride=32)
    assert fixed(q, k, v).shape == v.shape and not torch.allclose(fixed(q, k, v), wanted)


def test_modules_with_layouts_of_lengths_are_pickled():
    made = compat.MultiheadAttention(32, 2, compat.SparsityInfo("dense", 16))
    x = torch.rand(32, 1, 32)
    wanted = made(x, x, x)[0]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x, x, x)[0], wanted)
    short = torch.rand(16, 1, 32)
    assert made(short, x, x)[0].shape == short.shape


@pytest.mark.parametrize("order", ("NHWC", "CHWN"))
def test_convolutions(order):
    layout = (torch.rand(2, 2, 3, 3) > 0.5).long()
    made = compat.Conv2d(32, 32, (3, 3), layout, 16, (1, 1), (2, 2), order)
    assert list(made.state_dict()) == ["weight"]
    x = torch.rand(4, 32, 9, 9)
    y = made(x)
    wanted = nn.functional.conv2d(x, made.to_dense(), None, 2, 1)
    assert torch.allclose(y, wanted, atol=1e-5)
    memory = {"NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}[order]
    assert y.permute(memory).is_contiguous()
    k, r, s, c = layout.permute(0, 2, 3, 1).nonzero().unbind(1)
    dense = made.to_dense().unflatten(0, (2, 16)).unflatten(2, (2, 16))
    assert torch.equal(made.weight, dense[k, :, c, :, r, s])
