"""Softmax on the GPU against float64, and its gradients."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, softmax
from tests.families.blocksparse.softmax import cases as by_formula
from tests.gpu.families.blocksparse.cases import BF16, BLOCKS, F16, F32, TYPES, layout_of
from tests.gpu.watched import capture, nothing_waits

GATES = by_formula.GATES
OPTIONS = ("plain", "rpe", "scale", "masks", "least", "bools", "mul", "causal", "all")
every_block = pytest.mark.parametrize("block", BLOCKS, ids=str)


def options(name: str, layout: Layout, dtype) -> dict:
    """What a call of a batch (2, 3) is given besides x; a key of -inf is not all of a row."""
    (rows, cols), heads = layout.shape, layout.heads

    def drawn(*shape):
        return torch.randn(shape, device="cuda").to(dtype)

    given = {}
    if name in ("rpe", "all"):
        given["rpe"] = drawn(3, heads, rows, cols)
    if name in ("scale", "all"):
        given["scale"] = torch.tensor(0.7, device="cuda")
    if name in ("masks", "all"):
        given |= {"key_padding_mask": drawn(2, 3, cols), "attn_mask": drawn(rows, cols)}
        given["key_padding_mask"][..., ::5] = -math.inf
    if name == "least":  # of all of the last rows
        given["attn_mask"] = torch.zeros(rows, cols, device="cuda", dtype=dtype)
        given["attn_mask"][:, ::3] = given["attn_mask"][-3:] = torch.finfo(dtype).min
    if name == "bools":
        given["key_padding_mask"] = drawn(3, cols) > -1
        given["attn_mask"] = drawn(rows, cols) > -1
    if name == "mul":
        given["attn_mask"] = (drawn(rows, cols) > -1).to(dtype)
        given["attn_mask_mode"] = "mul"
    if name in ("causal", "all"):
        given["causal"] = True
    return given


def on_host(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def formula(layout: Layout, x, **given) -> torch.Tensor:
    """The whole matrices in float64, on the CPU."""
    return by_formula.formula(
        layout.cpu(), x.detach().cpu(), **{name: on_host(value) for name, value in given.items()}
    )


@every_block
@pytest.mark.parametrize("numbers", TYPES)
def test_values(numbers, block, seed):
    layout, dtype = layout_of(block, heads=2), TYPES[numbers]
    x = torch.randn(2, 3, layout.capacity, *block, device="cuda").to(dtype)
    x[..., layout.nnz :, :, :] = math.nan
    for name in OPTIONS:
        given = options(name, layout, dtype)
        out = torch.full_like(x, math.nan)
        found = softmax(x, layout, **given, out=out)
        assert found is out
        wanted = formula(layout, x.nan_to_num(0.0), **given)
        by_formula.check(layout.cpu(), out.cpu(), wanted, 2 * GATES[dtype])
        again = x.clone()
        assert torch.equal(softmax(again, layout, **given, out=again), out)


@every_block
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(name, numbers, block, seed):
    layout, dtype = layout_of(block, heads=2), TYPES[numbers]
    given = options(name, layout, dtype)
    x = torch.randn(2, 3, layout.capacity, *block, device="cuda").to(dtype).requires_grad_()
    leaves = {"x": x}
    for key in ("rpe", "scale", "key_padding_mask", "attn_mask"):
        value = given.get(key)
        if value is not None and value.is_floating_point() and name != "mul":
            leaves[key] = given[key] = value.requires_grad_()
    y = softmax(x, layout, **{k: v for k, v in given.items() if k != "x"})
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, list(leaves.values()), grad)
    wide = {k: v.detach().cpu().double().requires_grad_() for k, v in leaves.items()}
    others = {k: on_host(v) for k, v in given.items() if k not in leaves}
    start = {k: v for k, v in wide.items() if k != "x"}
    whole = by_formula.formula(layout.cpu(), wide["x"], **start, **others)
    dense = layout.cpu().to_dense(grad.cpu().double())
    wanted = torch.autograd.grad(whole, list(wide.values()), dense)
    gate = {F32: 1e-5, F16: 5e-3, BF16: 3e-2}[dtype]
    by_formula.check_gradients([t.cpu() for t in found], wanted, wide["x"].detach(), gate)


@pytest.mark.parametrize("numbers", TYPES)
def test_rows_that_nothing_is_left_of(numbers, seed):
    layout, dtype = Layout([[0, 0], [1, 1]], 32, device="cuda"), TYPES[numbers]
    x = torch.randn(2, 32, 32, device="cuda").to(dtype).requires_grad_()
    attn = torch.ones(64, 64, device="cuda", dtype=torch.bool)
    attn[40] = False
    key = torch.zeros(64, device="cuda", dtype=dtype)
    key[3] = -math.inf
    y = softmax(x, layout, 2.0, None, key, attn)
    (to_x,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert not y[:, 8].any() and not to_x[:, 8].any() and to_x.isfinite().all()
    assert not y[0, :, 3].any() and y.isfinite().all()


@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("columns", [16, 128])
def test_rows_of_any_length(columns, numbers, seed):
    dtype, count = TYPES[numbers], 66048 // columns
    layout = Layout([[1] * count], (16, columns), device="cuda")
    x = torch.randn(count, 16, columns, device="cuda").to(dtype)
    found = layout.to_dense(softmax(x, layout)).double()
    wanted = layout.to_dense(x).double().softmax(-1)
    # 1 / 66048 is a denormal of float16, of which it has 7 bits.
    gate = {F32: 1e-6, F16: 8e-3, BF16: 2.1e-3}[dtype]
    assert (found - wanted).norm() <= gate * wanted.norm()


def test_strides_and_a_batch_that_is_expanded(seed):
    layout = layout_of((32, 64), heads=2)
    x = torch.randn(3, layout.capacity, 32, 64, device="cuda").half()
    wanted = softmax(x, layout, causal=True)
    odd = torch.randn(3, layout.capacity, 32, 67, device="cuda").half()[..., 1:65].copy_(x)
    for given in (x.mT.contiguous().mT, odd):
        assert torch.equal(softmax(given, layout, causal=True), wanted)
    one = softmax(x[:1].expand(3, -1, -1, -1), layout)
    assert torch.equal(one[0], one[2])


def test_nobody_waits_and_a_graph_follows_what_changes(seed):
    layout = layout_of((64, 64), heads=2, room=30)
    x = torch.randn(2, layout.capacity, 64, 64, device="cuda").half()
    scale, mask = torch.tensor(0.3, device="cuda"), layout.mask()
    made = kl.BlockSparseSoftmax(causal=True)
    kl.prepare(made, layout, x, scale=scale)
    kl.run_kernel(made, layout, x, scale=scale)
    layout.update_(mask)
    with nothing_waits():
        kl.run_kernel(made, layout, x, scale=scale)
    with capture() as graph:
        layout.update_(mask)
        found = kl.run_kernel(made, layout, x, scale=scale)
    for _ in range(3):
        mask.copy_(torch.rand(mask.shape, device="cuda") < 0.4)
        x.normal_()
        scale.fill_(0.1)
        graph.replay()
        wanted = formula(layout, x, scale=0.1, causal=True)
        by_formula.check(layout.cpu(), found.cpu(), wanted, GATES[F16])
