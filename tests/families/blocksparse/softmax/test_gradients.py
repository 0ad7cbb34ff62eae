"""Gradients of block-sparse softmax, and theirs, against numbers and against torch's softmax."""

import pytest
import torch

from kernlib.families.blocksparse.softmax.functions import softmax
from tests.families.blocksparse.softmax.cases import (
    chance,
    check_gradients,
    dense,
    formula,
    layout,
    values,
)
from tests.support.speeds import slow_but

F64, LOWEST = torch.float64, -torch.inf


def made_layout():
    return layout(chance(2, 3, 2), 16, 1)


def option(name: str, made) -> tuple[dict, dict]:
    """The tensors with a gradient, and the other arguments."""
    (rows, cols), grads = made.shape, {}
    others = {"scale": 0.7}
    if name in ("rpe", "all"):
        grads["rpe"] = dense(made, 1, grad=True)
    if name in ("scale", "all"):
        others = {}
        grads["scale"] = torch.tensor(0.7, dtype=F64, requires_grad=True)
    if name in ("masks", "all"):
        grads["key_padding_mask"] = torch.randn(2, cols, dtype=F64, requires_grad=True)
        grads["attn_mask"] = torch.randn(rows, cols, dtype=F64, requires_grad=True)
    if name == "mul":
        others["attn_mask"] = (torch.rand(rows, cols) < 0.7).double()
        others["attn_mask_mode"] = "mul"
        others["key_padding_mask"] = torch.rand(2, cols) < 0.7
    if name in ("causal", "all"):
        others["causal"] = True
    return grads, others


OPTIONS = ("plain", "rpe", "scale", "masks", "mul", "causal", "all")


@pytest.mark.parametrize("name", slow_but(("plain", "all"), OPTIONS))
def test_gradients_are_those_of_numbers(name, seed):
    made = made_layout()
    grads, others = option(name, made)
    x = values(made, 2, grad=True)

    def call(x, *tensors):
        return softmax(x, made, **others, **dict(zip(grads, tensors, strict=True)))

    inputs = (x, *grads.values())
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_the_formula(name, dtype, seed):
    made = made_layout()
    grads, others = option(name, made)
    x, grad = values(made, 2, grad=True), dense(made, 2)
    wanted = torch.autograd.grad(formula(made, x, **grads, **others), (x, *grads.values()), grad)

    def cast(value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().to(dtype).requires_grad_(value.requires_grad) if is_float else value

    own, others = {k: cast(v) for k, v in grads.items()}, {k: cast(v) for k, v in others.items()}
    start = cast(x)
    y = softmax(start, made, **own, **others)
    found = torch.autograd.grad(y, (start, *own.values()), made.to_blocks(grad).to(dtype))
    gate = {F64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert {t.dtype for t in found} == {dtype}
    check_gradients(found, wanted, x.detach(), gate)


def test_rows_that_nothing_is_left_of_have_none(seed):
    made = layout([[0, 0], [1, 1]], 16)
    x = values(made, grad=True)
    rpe = dense(made, grad=True)
    attn = torch.ones(made.shape, dtype=torch.bool)
    attn[20] = False
    key = torch.zeros(32, dtype=F64)
    key[3] = LOWEST
    y = softmax(x, made, 2.0, rpe, key, attn)
    to_x, to_rpe = torch.autograd.grad(y, (x, rpe), torch.randn_like(y), create_graph=True)
    assert to_x.isfinite().all() and not made.to_dense(to_x)[20].any()
    assert not to_rpe[:16].any() and not to_rpe[20].any() and not to_rpe[:, 3].any()
    (again,) = torch.autograd.grad(to_x.square().sum(), x)
    assert again.isfinite().all() and not made.to_dense(again)[20].any()


def test_slots_without_a_block_have_none(seed):
    """Whatever stands there, in x and in the gradient that arrives."""
    made = layout([[1, 0], [1, 1]], 16, 2)
    x = values(made)
    x[3:] = torch.nan
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    y = softmax(x.requires_grad_(), made, scale)
    grad = torch.randn_like(y)
    grad[3:] = torch.nan
    to_x, to_scale = torch.autograd.grad(y, (x, scale), grad)
    assert not to_x[3:].any() and to_x.isfinite().all() and to_scale.isfinite()


def test_a_mask_that_chooses_has_none(seed):
    made = made_layout()
    x, mask = values(made, 2, grad=True), torch.ones(made.shape, dtype=F64, requires_grad=True)
    assert not softmax(x.detach(), made, attn_mask=mask, attn_mask_mode="mul").requires_grad
    softmax(x, made, attn_mask=mask, attn_mask_mode="mul").square().sum().backward()
    assert x.grad.any() and mask.grad is None


def test_transforms(seed):
    made = made_layout()
    x, rpe = values(made, 3, 2), dense(made, 3)
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=F64)

    def call(x, rpe, scale):
        return softmax(x, made, scale, rpe, causal=True)

    found = torch.vmap(call)(x, rpe, scales)
    one_by_one = [call(*given) for given in zip(x, rpe, scales, strict=True)]
    torch.testing.assert_close(found, torch.stack(one_by_one))
    to_x = torch.func.grad(lambda x: call(x, rpe[0], 0.5).square().sum())(x[0])
    start = x[0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(start, rpe[0], 0.5).square().sum(), start)
    torch.testing.assert_close(to_x, wanted)
    tangent = torch.randn_like(start)
    _, forward = torch.func.jvp(lambda x: call(x, rpe[0], 0.5), (x[0],), (tangent,))
    grad = torch.randn_like(forward)
    (backward,) = torch.autograd.grad(call(start, rpe[0], 0.5), start, grad)
    torch.testing.assert_close((forward * grad).sum(), (backward * tangent).sum())


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_of_gradients(name, seed):
    made = made_layout()
    grads, others = option(name, made)
    leaves = values(made, 2, grad=True), *grads.values()
    y = softmax(leaves[0], made, **grads, **others)
    batch = torch.randn(3, *y.shape, dtype=F64)
    found = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in batch]
    for ours, theirs in zip(found, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


@pytest.mark.parametrize("what", ["mask", "causal", "slot"])
def test_a_scale_has_the_gradient_of_what_takes_part_inside_of_transforms(what, seed):
    """Whatever x holds beside that."""
    made = layout([[1, 1]], 16, 1)
    x, others = values(made), {}
    if what == "mask":
        x[1], others["key_padding_mask"] = torch.nan, torch.arange(32) < 16
    elif what == "causal":
        x[1], others["causal"] = torch.inf, True
    else:
        x[2] = torch.nan

    def call(scale):
        return softmax(x, made, scale, **others).square().sum()

    scale = torch.tensor(0.5, dtype=F64, requires_grad=True)
    (wanted,) = torch.autograd.grad(call(scale), scale)
    assert wanted.isfinite()
    torch.testing.assert_close(torch.func.grad(call)(scale.detach()), wanted)
    (again,) = torch.func.hessian(call)(scale.detach()).flatten()
    assert again.isfinite()


def test_a_scale_has_second_derivatives_where_the_gradient_is_0(seed):
    """As for ``torch.autograd.functional.jvp``, which starts from a gradient of zeros."""
    made = layout([[1, 1], [0, 1]], 16, 1)
    x, scale = values(made), torch.tensor(0.5, dtype=F64)
    x[3] = torch.nan

    def call(scale):
        return softmax(x, made, scale)

    tangent = torch.ones_like(scale)
    _, wanted = torch.func.jvp(call, (scale,), (tangent,))
    _, found = torch.autograd.functional.jvp(call, scale, tangent)
    assert wanted[:3].any()
    torch.testing.assert_close(found, wanted)
