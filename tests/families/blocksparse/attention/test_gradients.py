"""Gradients of block-sparse attention, and theirs, against numbers and against the formula."""

import pytest
import torch

from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.layout import Layout
from tests.families.blocksparse.attention.cases import (
    BF16,
    F32,
    F64,
    LOWEST,
    Shape,
    check,
    formula,
)
from tests.families.blocksparse.attention.options import NAMES, option
from tests.support.speeds import slow_but

SHAPE = Shape()
SMALL = Shape(1, 2, 1, 18, 20, 2, 3, (16, 16))
FAST = ("score and mask",)
GATES = {F64: 1e-12, F32: 1e-5, BF16: 5e-2}


def finite(lse: torch.Tensor) -> torch.Tensor:
    """What of it differences can take."""
    return torch.where(lse == LOWEST, 0.0, lse)


@pytest.mark.parametrize("name", slow_but(FAST, NAMES))
def test_gradients_are_those_of_numbers(name, seed):
    made, given = SMALL.layout(), option(name, SMALL)
    names = [*given.captured]

    def call(q, k, v, *tensors):
        known = given.both | given.text | dict(zip(names, tensors, strict=True))
        out, lse = attention(q, k, v, made, return_lse=True, **known)
        return out, finite(lse)

    inputs = (
        *SMALL.tensors(grad=True),
        *(t.requires_grad_(t.is_floating_point()) for t in given.captured.values()),
    )
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", GATES, ids=str)
@pytest.mark.parametrize("heads", [None, 4, 8])
@pytest.mark.parametrize("density", [0.25, 1.0])
def test_gradients_are_right(heads, density, dtype, seed):
    made, given = SHAPE.layout(heads, density), option("score and mask", SHAPE)
    leaves = [t.to(dtype).requires_grad_() for t in (*SHAPE.tensors(), *given.captured.values())]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    found, wanted = [], []
    for each, run, known in ((leaves, attention, given.call), (wide, formula, given.both)):
        named = dict(zip(given.captured, each[3:], strict=True))
        functions = {n: make(named) for n, make in given.functions.items()}
        known = known | (named if run is attention else functions)
        options = {"return_lse": True} if run is attention else {}
        (wanted if run is formula else found).extend(run(*each[:3], made, **known, **options))
    grads = [torch.randn_like(t) for t in wanted]
    theirs = torch.autograd.grad((wanted[0], finite(wanted[1])), wide, grads)
    grads = [grad.to(y.dtype) for grad, y in zip(grads, found, strict=True)]
    ours = torch.autograd.grad((found[0], finite(found[1])), leaves, grads)
    assert [t.dtype for t in ours] == [dtype] * len(leaves)
    for t, other in zip(ours, theirs, strict=True):
        check(t, other, GATES[dtype])


def test_each_result_alone_has_its_gradient(seed):
    made, tensors = SHAPE.layout(), SHAPE.tensors(grad=True)
    out, lse = attention(*tensors, made, return_lse=True)
    y, logs = formula(*tensors, made)
    for ours, theirs in ((out, y), (finite(lse), finite(logs))):
        grad = torch.randn_like(theirs)
        found = torch.autograd.grad(ours, tensors, grad, retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(theirs, tensors, grad, retain_graph=True, allow_unused=True)
        for t, other in zip(found, wanted, strict=True):
            if other is None:  # v, by lse
                assert not t.any()
            else:
                check(t, other, 1e-12)


def test_a_mask_and_whole_numbers_have_none(seed):
    made, (q, k, v) = SHAPE.layout(), SHAPE.tensors(grad=True)
    keep = torch.randn(50, 70, dtype=F64, requires_grad=True)
    shift = torch.randint(-2, 3, (50, 70))
    y = attention(q, k, v, made, mask="keep > 0", score="v + shift", keep=keep, shift=shift)
    y.square().sum().backward()
    assert q.grad.any() and keep.grad is None
    alone = attention(*(t.detach() for t in (q, k, v)), made, mask="keep > 0", keep=keep)
    assert not alone.requires_grad


def test_rows_that_nothing_is_left_of_have_none(seed):
    made, tensors = (
        Layout([[0, 0, 0], [1, 0, 1]], 16, 4),
        Shape(queries=32, keys=48).tensors(grad=True),
    )
    bias = torch.zeros(32, 48, dtype=F64)
    bias[20] = LOWEST
    bias = bias.requires_grad_()
    out, lse = attention(*tensors, made, score="v + bias", bias=bias, return_lse=True)
    assert (lse[:, :, :16] == LOWEST).all() and (lse[:, :, 20] == LOWEST).all()
    grads = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (*tensors, bias), grads, create_graph=True)
    assert all(t.isfinite().all() for t in found)
    assert not found[0][:, :, :16].any() and not found[0][:, :, 20].any()
    assert not found[3][:16].any() and not found[3][20].any() and not found[1][:, :, 16:32].any()
    for t in torch.autograd.grad(sum(t.square().sum() for t in found), (*tensors, bias)):
        assert t.isfinite().all()


def test_gradients_of_gradients_are_the_formula_s(seed):
    made, given = SHAPE.layout(8), option("score and mask", SHAPE)
    leaves = [t.requires_grad_() for t in (*SHAPE.tensors(), *given.captured.values())]
    found = []
    for y, lse in (
        attention(*leaves[:3], made, return_lse=True, **given.call),
        formula(*leaves[:3], made, **given.formula),
    ):
        loss = y.square().sum() + finite(lse).square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in first), leaves))
    for ours, theirs in zip(*found, strict=True):
        check(ours, theirs, 1e-11)


def test_memory_is_that_of_the_operands(seed):
    """No logits are kept for the gradient."""
    shape = Shape(1, 2, 2, 256, 256, 8, 8, (64, 64))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        attention(*shape.tensors(F32, grad=True), shape.dense(), score="tanh(v)")
    assert kept and max(kept) <= 2 * 256 * 8


def test_transforms(seed):
    made, (q, k, v) = SHAPE.layout(4), SHAPE.tensors()
    bias = torch.randn(3, 50, 70, dtype=F64)
    queries = torch.stack([q, 2 * q, -q], 1)

    def call(q, bias):
        return attention(q, k, v, made, score="tanh(v) + bias", bias=bias, causal=True)

    found = torch.vmap(call, (1, 0))(queries, bias)
    one_by_one = [call(*given) for given in zip(queries.unbind(1), bias, strict=True)]
    torch.testing.assert_close(found, torch.stack(one_by_one))
    to_q = torch.func.grad(lambda q: call(q, bias[0]).square().sum())(q)
    start = q.clone().requires_grad_()
    y = call(start, bias[0])
    torch.testing.assert_close(to_q, torch.autograd.grad(y.square().sum(), start)[0])
    tangent = torch.randn_like(q)
    _, forward = torch.func.jvp(lambda q: call(q, bias[0]), (q,), (tangent,))
    grad = torch.randn_like(forward)
    (backward,) = torch.autograd.grad(call(start, bias[0]), start, grad)
    torch.testing.assert_close((forward * grad).sum(), (backward * tangent).sum())


def test_batches_of_gradients(seed):
    made, given = SHAPE.layout(), option("score and mask", SHAPE)
    leaves = [t.requires_grad_() for t in (*SHAPE.tensors(), *given.captured.values())]
    y = attention(*leaves[:3], made, **given.call)
    batch = torch.randn(3, *y.shape, dtype=F64)
    found = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in batch]
    for ours, theirs in zip(found, zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(theirs))


def test_the_same_probabilities_are_dropped_again(seed):
    """By a seed that was drawn."""
    made, tensors = SHAPE.dense(), SHAPE.tensors(grad=True)
    torch.manual_seed(3)
    y = attention(*tensors, made, dropout_p=0.4)
    torch.manual_seed(3)
    drawn = int(torch.randint(2**53, ()))
    wanted, _ = formula(*tensors, made, dropout_p=0.4, seed=drawn)
    check(y, wanted, 1e-12)
    grad = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(t, tensors, grad) for t in (y, wanted)),
                            strict=True):  # fmt: skip
        check(ours, theirs, 1e-12)


DEPENDENT = {  # arguments of one tensor x of SMALL's, each None or a function of it
    "one tensor": (lambda x: (x, x, x), {}),
    "keys of queries": (lambda x: (x, 2 * x, x.sin()), {}),
    "a captured tensor of queries": (
        lambda x: (x, x.cos(), x),
        {"a": lambda x: x.mean((0, 2, 3)), "b": lambda x: x.mean((0, 2, 3)) ** 2},
    ),
}


@pytest.mark.parametrize("case", DEPENDENT)
def test_gradients_that_are_recorded_are_those_that_are_not(case, seed):
    """Each argument has its own share of a tensor that several are made of, once."""
    operands, captured = DEPENDENT[case]
    made = Layout(torch.rand(2, 2) < 0.8, 16)
    x = torch.randn(1, 2, 32, 8, dtype=F64, requires_grad=True)
    known = {"score": "v * a + b", "axes": dict.fromkeys(captured, "head")} if captured else {}

    def call(run):
        tensors = {name: make(x) for name, make in captured.items()}
        return run(*operands(x), made, **known, **tensors).square().sum()

    def first(**rest):
        return torch.autograd.grad(call(attention), x, **rest)[0]

    recorded = first(create_graph=True)
    torch.testing.assert_close(recorded, first())
    (second,) = torch.autograd.grad(recorded.square().sum(), x)
    step = 1e-5 * torch.randn_like(x)
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            x += sign * step
        sides.append(first().square().sum())
        with torch.no_grad():
            x -= sign * step
    assert torch.allclose((sides[0] - sides[1]) / 2, (second * step).sum(), rtol=1e-4)
