"""Layers, attention and Torch-Blocksparse's operators on the GPU."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from kernlib import blocksparse
from kernlib.blocksparse import Layout
from kernlib.compat import torch_blocksparse
from kernlib.families.blocksparse.contents import host
from kernlib.nn import BlockSparseLinear, BlockSparseMultiheadAttention, block_sparse_attention
from tests.gpu.families.blocksparse.cases import BF16, F16, F32, check, layout_of
from tests.gpu.watched import capture, nothing_waits

KINDS = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
GATES = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}


@KINDS
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_linear_layer_trains(block, dtype, seed):
    """Forward, gradients, and blocks that move in between."""
    layer = BlockSparseLinear(
        512, 256, block, device="cuda", dtype=dtype, activation="gelu", density=0.4
    )
    optimizer = torch.optim.Adam(layer.parameters(), 1e-3, eps=1e-4)  # no 0 in float16
    for step in range(3):
        layer.watch_growth(step == 1)
        x = torch.randn(3, 40, 512, device="cuda").to(dtype).requires_grad_()
        wide = [t.detach().double().requires_grad_() for t in (x, layer.to_dense(), layer.bias)]
        wanted = F.gelu(F.linear(*wide))
        y = layer(x)
        check(y, wanted.detach(), GATES[dtype])
        grad = torch.randn_like(y)
        y.backward(grad)
        to_x, to_weight, to_bias = torch.autograd.grad(wanted, wide, grad.double())
        check(x.grad, to_x, 2 * GATES[dtype])
        stored = layer.layout.to_dense(torch.ones_like(layer.weight))
        check(layer.layout.to_dense(layer.weight.grad), to_weight * stored, 2 * GATES[dtype])
        check(layer.bias.grad, to_bias, 2 * GATES[dtype])
        if step == 1:
            found = layer.growth_candidates.to_dense(layer.growth_gradient)
            check(found, to_weight, 3 * GATES[dtype])
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            before = layer.layout.nnz
            layer.drop_(2, optimizer=optimizer).regrow_(2, optimizer=optimizer)
            assert layer.layout.nnz == before


def test_a_layer_is_the_same_of_a_layout_that_the_host_knows_and_of_one_that_it_does_not(seed):
    """What it draws and its mark, computed where the contents are known."""
    mask = torch.rand(4, 6) < 0.5
    layout, there = Layout(mask, 32, device="cuda"), Layout(mask.cuda(), 32)
    assert host.on_host(layout).mask().equal(mask) and host.on_host(there) is None
    assert host.on_host(copy.deepcopy(layout)).mask().equal(mask)
    layers = []
    for each in (layout, there):
        torch.manual_seed(0)
        layers.append(BlockSparseLinear(192, 128, each, device="cuda"))
    first, second = (layer.state_dict() for layer in layers)
    assert all(torch.equal(first[name], second[name]) for name in first)
    moved = mask.flip(0)  # as many blocks: a layout has room for those that it began with
    layout.update_(moved.cuda())
    assert host.on_host(layout) is None and layout.mask().cpu().equal(moved)


def test_a_training_step_waits_for_nothing(seed):
    layer = BlockSparseLinear(512, 256, 64, device="cuda", dtype=F16, density=0.4)
    x, grad = (torch.randn(40, n, device="cuda").half() for n in (512, 256))
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3, momentum=0.9)

    def step():
        layer.watch_growth()
        layer(x).backward(grad)
        optimizer.step()
        layer.drop_(1, optimizer=optimizer).regrow_(1, optimizer=optimizer)
        optimizer.zero_grad()

    step()
    with nothing_waits():
        step()


def test_a_step_is_captured(seed):
    """Forward and backward of a layer in one graph."""
    layer = BlockSparseLinear(256, 128, 32, device="cuda", dtype=F16, density=0.4)
    x = torch.randn(72, 256, device="cuda").half()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            layer(x).square().sum().backward()
            layer.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(stream)
    with capture() as graph:
        layer(x).square().sum().backward()
    for _ in range(2):
        x.normal_()
        graph.replay()
        wide = layer.to_dense().detach().double().requires_grad_()
        F.linear(x.double(), wide, layer.bias.double()).square().sum().backward()
        stored = layer.layout.to_dense(torch.ones_like(layer.weight))
        check(layer.layout.to_dense(layer.weight.grad), wide.grad * stored, 4e-3)


@KINDS
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("size", [16, 32, 48, 64, 80, 96, 128])
def test_attention(size, block, dtype, seed):
    length = 3 * block
    mask = torch.ones(length // block, length // block, dtype=torch.bool).tril()
    mask[2, 0] = 0
    layout = Layout(mask, block, device="cuda")
    given = [torch.randn(2, 3, length, size, device="cuda").to(dtype) for _ in range(3)]
    leaves = [t.requires_grad_() for t in given]
    wide = [t.detach().double().requires_grad_() for t in given]
    q, k, v = wide
    kept = layout.to_dense(torch.ones(layout.capacity, block, block, device="cuda")).bool().tril()
    logits = (q @ k.mT / math.sqrt(size)).masked_fill(~kept, -math.inf)
    wanted = logits.softmax(-1) @ v
    y = block_sparse_attention(*leaves, layout, causal=True)
    check(y, wanted.detach(), 2 * GATES[dtype])
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, grad)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, wide, grad.double()), strict=True):
        check(ours, theirs, 8 * GATES[dtype])


def test_one_head_meets_each_head_of_a_layout(seed):
    """Operands without heads of their own are read by all of the layout's."""
    layout = Layout(torch.ones(3, 4, 4, dtype=torch.bool).tril(), 32, device="cuda")
    q, k, v = (torch.randn(2, 1, 128, 64, device="cuda").half() for _ in range(3))
    wide = (t.double().expand(2, 3, 128, 64) for t in (q, k, v))
    found = block_sparse_attention(q, k, v, layout, causal=True)
    check(found, F.scaled_dot_product_attention(*wide, is_causal=True), 2 * GATES[F16])


@pytest.mark.parametrize("masked", [False, True])
def test_a_module_of_attention_is_that_of_the_cpu(masked, seed):
    layout = blocksparse.fixed(256, 32, 64, heads=4, device="cuda")
    layer = BlockSparseMultiheadAttention(128, 4, layout, device="cuda")
    other = copy.deepcopy(layer).cpu().double()
    x = torch.randn(256, 2, 128, device="cuda")
    options = {}
    if masked:
        options["key_padding_mask"] = torch.rand(2, 256, device="cuda") < 0.1
    found = layer(x, x, x, is_causal=True, **options)[0]
    moved = {name: t.cpu() for name, t in options.items()}
    wide = x.cpu().double()
    wanted = other(wide, wide, wide, is_causal=True, **moved)[0]
    check(found.cpu(), wanted, 1e-5)


# The predecessor's own cases.


def test_its_relu_waits_for_nothing(seed):
    x, residual = (torch.randn(4, 64, 15, 15, device="cuda") for _ in range(2))
    scale, bias = (torch.rand(1, device="cuda", requires_grad=True) for _ in range(2))
    op = torch_blocksparse.ReLU()
    op(x, scale, bias, residual).sum().backward()
    with nothing_waits():
        y = op(x, scale, bias, residual)
        y.sum().backward()
    check(y.detach(), F.relu(x.double() * scale + bias + residual).detach(), 1e-6)


def test_a_layer_under_autocast_and_compiled(seed):
    layout = layout_of((64, 64), (4, 8))
    layer = BlockSparseLinear(512, 256, layout, device="cuda")
    x = torch.randn(40, 512, device="cuda")
    wanted = F.linear(x.double(), layer.to_dense().double(), layer.bias.double()).detach()
    with torch.autocast("cuda", torch.bfloat16):
        found = layer(x)
        assert found.dtype == BF16
        check(found.detach(), wanted, 1.2e-2)
        made = torch.compile(layer, fullgraph=True)
        check(made(x).detach(), wanted, 1.2e-2)


def test_compiled_transforms_of_a_layer_and_of_attention(seed):
    torch._dynamo.reset()
    layer = BlockSparseLinear(512, 256, layout_of((64, 64), (4, 8)), device="cuda")
    x = torch.randn(40, 512, device="cuda")
    slope = torch.func.grad(lambda v: layer(v).square().sum())
    torch.testing.assert_close(
        torch.compile(slope, fullgraph=True)(x), slope(x), rtol=1e-3, atol=1e-3
    )
    layout = blocksparse.causal(128, 32, device="cuda")
    q = torch.randn(1, 2, 128, 64, device="cuda", dtype=F16)
    slope = torch.func.grad(
        lambda v: blocksparse.attention(v, q, q, layout, causal=True).float().square().sum()
    )
    torch.testing.assert_close(
        torch.compile(slope, fullgraph=True)(q), slope(q), rtol=2e-2, atol=2e-2
    )
    torch._dynamo.reset()
