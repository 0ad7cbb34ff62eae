"""BlockSparseConv2d against torch's convolution of its dense weight."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernlib.families.blocksparse import builders
from kernlib.nn.block_sparse.conv import BlockSparseConv2d, taps_layout

DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def dense_of(made: BlockSparseConv2d) -> nn.Conv2d:
    plain = nn.Conv2d(
        made.in_channels, made.out_channels, made.kernel_size, made.stride, made.padding,
        made.dilation, 1, made.bias is not None, made.padding_mode, dtype=made.weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        plain.weight.copy_(made.to_dense())
        if made.bias is not None:
            plain.bias.copy_(made.bias)
    return plain


def test_arguments_are_those_of_torch_and_its_own():
    theirs = list(inspect.signature(nn.Conv2d).parameters)
    own = ["layout", "activation", "density", "capacity", "precision"]
    assert list(inspect.signature(BlockSparseConv2d).parameters) == theirs + own


CASES = {
    "plain": {},
    "no bias": {"bias": False, "padding": "valid"},
    "strided": {"padding": 1, "stride": (2, 3)},
    "same": {"padding": "same", "dilation": (2, 1)},
    "uneven": {"padding": "same", "kernel_size": (1, 5)},
    "even": {"padding": "same", "kernel_size": (2, 4)},  # what is over is padded behind
    "circular": {"padding": (2, 1), "padding_mode": "circular", "dilation": 2},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "one": {"kernel_size": 1},
}


@pytest.mark.few(100)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    options = {"kernel_size": 3, **CASES[case]}
    made = BlockSparseConv2d(32, 48, layout=16, density=0.5, dtype=DOUBLE, **options)
    plain = dense_of(made)
    x = torch.randn(2, 32, 7, 8, dtype=DOUBLE, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    y, wanted = made(x), plain(other)
    assert y.shape == wanted.shape and torch.allclose(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(x.grad, other.grad)
    as_matrix = plain.weight.grad.permute(0, 2, 3, 1).flatten(1)
    assert torch.allclose(made.weight.grad, made.layout.to_blocks(as_matrix))
    if made.bias is not None:
        assert torch.allclose(made.bias.grad, plain.bias.grad)
    assert torch.allclose(made(x[0]), wanted[0])


def test_the_order_of_blocks_is_that_of_taps():
    mask = torch.rand(3, 2, 3, 3) > 0.5
    layout = taps_layout(mask, 16)
    made = BlockSparseConv2d(32, 48, 3, layout=layout, bias=False)
    k, r, s, c = mask.permute(0, 2, 3, 1).nonzero().unbind(1)
    dense = made.to_dense().unflatten(0, (3, 16)).unflatten(2, (2, 16))
    assert torch.equal(made.weight, dense[k, :, c, :, r, s])
    assert dense.count_nonzero() == mask.sum() * 256 and made.layout is not layout


def test_activation_growth_and_states():
    made = BlockSparseConv2d(16, 32, 3, layout=16, density=0.5, dtype=DOUBLE, activation="gelu")
    x = torch.randn(2, 16, 5, 5, dtype=DOUBLE)
    plain = dense_of(made)
    assert torch.allclose(made(x), F.gelu(plain(x)))
    made.watch_growth()(x).square().sum().backward()
    F.gelu(plain(x)).square().sum().backward()
    gradient = made.growth_candidates.to_dense(made.growth_gradient)
    assert torch.allclose(gradient, plain.weight.grad.permute(0, 2, 3, 1).flatten(1))
    assert made.drop_(3).regrow_(2).watch_growth(False).layout.nnz == 8
    other = BlockSparseConv2d(16, 32, 3, layout=16, density=0.5, dtype=DOUBLE, activation="gelu")
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), made(x)) and torch.equal(copy.deepcopy(other)(x), made(x))
    assert "kernel_size=(3, 3)" in repr(made) and "density=0.444" in repr(made)


def test_compiled_it_is_one_graph():
    made, x = BlockSparseConv2d(16, 16, 3, layout=16, density=0.5), torch.randn(1, 16, 4, 4)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(made, fullgraph=True, backend="eager")(x), made(x))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"groups": 2}, NotImplementedError, "groups must be 1, got 2"),
        ({"kernel_size": (3, 3, 3)}, TypeError, "kernel_size must be an int or two"),
        ({"kernel_size": 0}, ValueError, "kernel_size must be 1 to"),
        ({"padding": "full"}, ValueError, "padding must be 'valid', 'same'"),
        ({"padding": "same", "stride": 2}, ValueError, "'same' needs a stride of 1"),
        ({"padding_mode": "none"}, ValueError, "padding_mode must be one of"),
        ({"in_channels": 0}, ValueError, "in_channels must be 1 to"),
        ({"out_channels": 40}, ValueError, "out_channels must be a multiple of 16"),
        ({"in_channels": 3}, ValueError, r"kernel columns \* in_channels must be a multiple"),
        ({"layout": builders.dense(16, 16, 16), "density": None}, ValueError, r"\(16, 288\), got"),
        ({"density": None}, ValueError, "density must be given"),
    ],
)
def test_what_is_refused(options, kind, words):
    given = {"in_channels": 32, "out_channels": 16, "kernel_size": 3, "layout": 16, "density": 1.0}
    with pytest.raises(kind, match=words):
        BlockSparseConv2d(**{**given, **options})


def test_inputs_that_are_refused():
    made = BlockSparseConv2d(16, 16, 3, layout=16, density=1.0)
    for x, kind, words in (
        (torch.ones(16, 16), ValueError, r"\(N, 16, H, W\) or \(16, H, W\), got \(16, 16\)"),
        (torch.ones(1, 8, 5, 5), ValueError, r"got \(1, 8, 5, 5\)"),
        (torch.ones(1, 16, 2, 5), ValueError, r"as large as the kernel, \(3, 3\), with padding"),
        (torch.ones(1, 16, 5, 5).double(), TypeError, "input must be torch.float32"),
        (torch.ones(1, 16, 5, 5, device="meta"), ValueError, "input must be on cpu"),
        (None, TypeError, "input must be a tensor"),
    ):
        with pytest.raises(kind, match=words):
            made(x)
    with pytest.raises(ValueError, match="mask must be a tensor"):
        taps_layout(torch.ones(2, 2, 3), 16)
