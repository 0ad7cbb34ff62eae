"""Gradients of block-sparse products, to the second order: those of torch through the reference,
those of the formulas through the operators, and those of autograd's functions on GPUs that exist
only by name."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import kernlib as kl
from kernlib.families.blocksparse import operators
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime import products as runtime
from tests.families.blocksparse.cases import (
    LAYOUTS,
    MODES,
    TURNS,
    formula,
    gpu,
    host,
    install,
    layout_of,
    memories,
    operands,
    places,
    randn,
    run,
    shapes,
)
from tests.support import fakes
from tests.support.speeds import slow_but

MODE = pytest.mark.parametrize("mode", MODES)
TURN = pytest.mark.parametrize("turned", TURNS, ids=str)
LEADS = [((), ()), ((2,), ()), ((), (2,)), ((2, 1), (3,)), ((1,), (2, 3)), ((2,), (2,))]
SPARSE = {"dsd": 0, "dds": 1}  # which operand
WAYS = ("reference", "operator")


def by_operator(mode, layout, a, b, turned=(False, False), bias=None):
    """The product by the operator, whose gradients are the formulas'."""
    made = BlockSparseMatmul(mode, transpose_a=turned[0], transpose_b=turned[1])
    if bias is not None:
        made = made.replace(epilogue=kl.Bias())
    return operators.multiply(made, layout, a, b, bias)


BY = dict(zip(WAYS, (run, by_operator), strict=True))


def close_gradients(found, wanted, tensors) -> None:
    """With random gradients that arrive, in slots without a block too."""
    grad = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(t, tensors, grad) for t in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def small(mode, turned, layout):
    """A product of few numbers that depend on its operands: of blocks of 16 only their corners."""
    ends = shapes(mode, layout, turned, 2)
    wholes = [torch.randn(end, dtype=torch.float64) for end in ends]
    corners = [randn(*(min(n, 2) for n in end), grad=True) for end in ends]

    def function(run, *corners):
        padded = [
            torch.nn.functional.pad(
                corner,
                [x for n, m in zip(whole.shape[::-1], corner.shape[::-1], strict=True)
                 for x in (0, n - m)],
            )
            + whole
            for corner, whole in zip(corners, wholes, strict=True)
        ]  # fmt: skip
        return run(mode, layout, *padded, turned)[..., ::9, ::9]

    return function, corners


SMALL = {"tiny": Layout([[1, 0], [0, 1]], 16, 3), "heads": layout_of("a head without")}


@pytest.mark.parametrize("way", WAYS)
@MODE
@pytest.mark.parametrize("name", slow_but(("tiny",), SMALL))
@pytest.mark.parametrize("turned", slow_but(TURNS[:1] + TURNS[3:], TURNS), ids=str)
def test_first_and_second_gradients_are_right(turned, name, mode, way, seed):
    function, corners = small(mode, turned, SMALL[name])
    assert gradcheck(partial(function, BY[way]), corners)
    assert gradgradcheck(partial(function, BY[way]), corners)


@pytest.mark.parametrize("way", WAYS)
@MODE
@TURN
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_the_matrices(name, turned, mode, way, seed):
    layout = layout_of(name)
    tensors = operands(mode, layout, turned, grad=True)
    found, wanted = BY[way](mode, layout, *tensors, turned), formula(mode, layout, *tensors, turned)
    if not places(layout):
        wanted = wanted + 0 * sum(t.sum() for t in tensors)
    close_gradients(found, wanted, tensors)


@pytest.mark.parametrize("way", WAYS)
@MODE
@TURN
@pytest.mark.parametrize("name", ["wide", "heads"])
@pytest.mark.parametrize("heads", [None, 1])
def test_gradients_of_batches_are_summed(heads, name, turned, mode, way, seed):
    """And those of a matrix that is one for all heads."""
    layout = layout_of(name)
    for leads in LEADS:
        tensors = operands(mode, layout, turned, leads=leads, heads=heads, grad=True)
        found = BY[way](mode, layout, *tensors, turned)
        close_gradients(found, formula(mode, layout, *tensors, turned), tensors)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["dsd", "dds"])
@pytest.mark.parametrize("name", ["wide", "heads", "none of 2"])
def test_gradients_of_a_bias(name, mode, way, seed):
    layout = layout_of(name)
    for turned, leads in itertools.product(TURNS, LEADS[:4]):
        a, b = operands(mode, layout, turned, leads=leads, grad=True)
        plain = formula(mode, layout, a, b, turned)
        bias = randn(plain.shape[-2 if mode == "dsd" else -1], grad=True)
        wanted = plain + (bias[:, None] if mode == "dsd" else bias)
        options = {"epilogue": kl.Bias()} if way == "reference" else {}
        found = BY[way](mode, layout, a, b, turned, bias=bias, **options)
        if not places(layout):
            wanted = wanted + 0 * (a.sum() + b.sum())
        close_gradients(found, wanted, (a, b, bias))


@MODE
def test_gradients_of_epilogues(mode, seed):
    layout = layout_of("wide")
    tensors = operands(mode, layout, leads=((2,), ()), grad=True)
    numbers = [randn(grad=True) for _ in range(2)]
    epilogue = kl.Add(), kl.Custom("v * v * gain", ("gain",))
    y = randn(*run(mode, layout, *tensors).shape[1:], grad=True)
    beta, gain = numbers
    found = run(mode, layout, *tensors, epilogue=epilogue, y=y, beta=beta, gain=gain)
    wanted = (formula(mode, layout, *tensors) + beta * y).square() * gain
    if mode == "sdd":
        wanted = torch.cat((wanted[..., :-1, :, :], 0 * wanted[..., -1:, :, :]), -3)
    close_gradients(found, wanted, (*tensors, y, *numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@MODE
def test_gradients_of_every_dtype_match_float64(mode, way, dtype, seed):
    layout = layout_of("heads")
    tensors = operands(mode, layout, size=33, leads=((3,), ()), dtype=dtype, grad=True)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    found, wanted = BY[way](mode, layout, *tensors), formula(mode, layout, *wide)
    grad = torch.randn_like(found)
    ours = torch.autograd.grad(found, tensors, grad)
    theirs = torch.autograd.grad(wanted, wide, grad.double())
    gate = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == dtype and (one.double() - other).norm() <= gate * other.norm()


@pytest.mark.parametrize("way", WAYS)
@MODE
def test_a_gradient_of_any_strides_is_taken(mode, way, seed):
    layout = layout_of("heads")
    tensors = operands(mode, layout, leads=((2,), ()), grad=True)
    y = BY[way](mode, layout, *tensors)
    grad = randn(*y.shape)
    wanted = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    for _, other in memories(grad):
        found = torch.autograd.grad(y, tensors, other, retain_graph=True)
        torch.testing.assert_close(found, wanted)
    zero = torch._efficientzerotensor(y.shape, dtype=y.dtype)
    for other in (randn().expand(y.shape), zero):
        ours, theirs = (
            torch.autograd.grad(y, tensors, g, retain_graph=True) for g in (other, other.clone())
        )
        torch.testing.assert_close(ours, theirs)


# What is not read.


@pytest.mark.parametrize("way", WAYS)
@MODE
@TURN
@pytest.mark.parametrize("name", ["wide", "tall", "none of 2"])
def test_unused_slots_reach_no_gradient_and_get_0(name, turned, mode, way, seed):
    layout = layout_of(name)
    used = len(places(layout))
    a, b = operands(mode, layout, turned)
    grad = randn(*run(mode, layout, a, b, turned).shape)
    found = []
    for junk in (0.0, math.nan):
        given = [t.clone() for t in (a, b)]
        arriving = grad.clone()
        (arriving if mode == "sdd" else given[SPARSE[mode]])[used:] = junk
        leaves = [t.requires_grad_() for t in given]
        y = BY[way](mode, layout, *leaves, turned)
        found.append(torch.autograd.grad(y, leaves, arriving))
    torch.testing.assert_close(*found)
    if mode != "sdd":
        assert not found[1][SPARSE[mode]][used:].any()


def lines_of(mode, place) -> int:
    """The dimension of a dense operand that blocks meet: rows or columns of S, as it is stored."""
    return {("sdd", 0): 0, ("sdd", 1): 1, ("dsd", 1): 0, ("dds", 0): 1}[mode, place]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("last", [0, 2])
@MODE
def test_what_no_stored_block_meets_reaches_no_gradient(mode, last, way, seed):
    """Dense operands with lines that are not numbers: one that no block meets, and one that a block
    does, the first or the last; and so are unused slots."""
    layout = Layout([[1, 0, 0], [0, 0, 0], [0, 0, 1]], 16, 4)
    a, b = operands(mode, layout, grad=True)
    grad = randn(*run(mode, layout, a, b).shape)
    wanted = torch.autograd.grad(BY[way](mode, layout, a, b), (a, b), grad)
    dense = [place for place in range(2) if SPARSE.get(mode) != place]
    with torch.no_grad():
        for place in dense:
            for line in (1, last):
                (a, b)[place].narrow(lines_of(mode, place), 16 * line, 16).fill_(math.nan)
        (grad if mode == "sdd" else (a, b)[SPARSE[mode]])[2:] = math.nan
    found = torch.autograd.grad(BY[way](mode, layout, a, b), (a, b), grad)
    for place, pair in enumerate(zip(found, wanted, strict=True)):
        if place not in dense:  # of the values of two blocks
            spoilt = int(last == 2)
            torch.testing.assert_close(*(t[1 - spoilt] for t in pair))
            assert pair[0][spoilt].isnan().any() and not pair[0][2:].any()
            continue
        kept = (2 - last, 1) if mode == "sdd" else (0, 1, 2)
        for line in kept:
            torch.testing.assert_close(
                *(t.narrow(lines_of(mode, place), 16 * line, 16) for t in pair)
            )


# What is recorded and kept.


@MODE
def test_a_layout_that_changes_before_the_backward_is_noticed_by_the_operator(mode, seed):
    layout = Layout([[1, 0, 1], [0, 1, 0]], 16)
    tensors = operands(mode, layout, grad=True)
    y = by_operator(mode, layout, *tensors)
    layout.update_(torch.tensor([[0, 1, 1], [0, 1, 0]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def assert_equal(found, wanted) -> None:
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


# Autograd's functions, on GPUs that exist only by name.


@pytest.fixture
def gpus(monkeypatch):
    """Plain CPU tensors are taken for those of a GPU, so that autograd hands on what it has."""
    fakes.forget()
    monkeypatch.setitem(fakes.MODELS, -1, fakes.MODELS[0])
    monkeypatch.setattr(runtime, "is_on_gpu", lambda device: True)
    yield install(monkeypatch)
    fakes.forget()


def quarters(*shape):
    """Of which sums are exact."""
    return host(gpu(*shape))


def recorded(*shape):
    return quarters(*shape).requires_grad_()


def check_on_gpu(mode, layout, turned, leads=((), ()), twice=False) -> None:
    ends = shapes(mode, layout, turned)
    tensors = [recorded(*lead, *end) for lead, end in zip(leads, ends, strict=True)]
    y = run(mode, layout, *tensors, turned)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    wanted = formula(mode, layout, *wide, turned)
    grad = quarters(*y.shape)
    ours = torch.autograd.grad(y, tensors, grad, create_graph=twice)
    theirs = torch.autograd.grad(wanted, wide, grad.double(), create_graph=twice)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.detach(), other.detach().float())
    if twice:
        ours = torch.autograd.grad(sum(f.square().sum() for f in ours), tensors)
        theirs = torch.autograd.grad(sum(f.square().sum() for f in theirs), wide)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-3)


@MODE
@TURN
@pytest.mark.parametrize("name", ["wide", "heads", "tall", "a head without"])
def test_eager_gradients_are_their_problems(name, turned, mode, gpus, seed):
    layout = layout_of(name)
    check_on_gpu(mode, layout, turned, twice=True)
    for leads in LEADS:
        check_on_gpu(mode, layout, turned, leads)


def test_shared_values_of_a_layer_take_one_sum_over_the_batch(gpus, seed):
    """Of ``x S^T`` the batch joins what is summed over: no values for each entry of a batch."""
    check_on_gpu("dds", layout_of("wide"), (False, True), ((4,), ()))
    *_, problem = gpus.lowering.problems
    assert (problem.batch, problem.depth) == (1, 20)


@MODE
def test_one_gradient_is_one_launch(mode, gpus, seed):
    layout = layout_of("wide")
    for place in range(2):
        tensors = [quarters(*end) for end in shapes(mode, layout)]
        tensors[place].requires_grad_()
        y = run(mode, layout, *tensors)
        before = len(gpus.launches)
        y.sum().backward()
        assert len(gpus.launches) == before + 1 and tensors[1 - place].grad is None


@MODE
def test_a_layout_that_changes_before_the_backward_is_noticed(mode, gpus, seed):
    layout = layout_of("plain")
    tensors = [recorded(*end) for end in shapes(mode, layout)]
    y = run(mode, layout, *tensors)
    layout.update_(layout.mask())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["plain", "heads"])
@MODE
def test_batches_of_eager_gradients_are_the_references(mode, name, gpus, seed):
    """As operators that take lists of tensors know nothing of ``is_grads_batched``."""
    layout = layout_of(name)
    tensors = [recorded(*end) for end in shapes(mode, layout)]
    y = run(mode, layout, *tensors)
    grads = quarters(3, *y.shape)
    found = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, tensors, grad, retain_graph=True) for grad in grads]
    assert_equal(found, map(torch.stack, zip(*wanted, strict=True)))


@pytest.mark.parametrize("mode", ["dsd", "dds"])
def test_eager_gradients_of_a_bias_and_of_epilogues(mode, gpus, seed):
    layout = layout_of("wide")
    tensors = [
        recorded(*lead, *end) for lead, end in zip(((2,), ()), shapes(mode, layout), strict=False)
    ]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    plain = formula(mode, layout, *wide)
    axis = -2 if mode == "dsd" else -1
    bias = recorded(plain.shape[axis])
    added = bias.detach().double().requires_grad_()
    wanted = (plain + (added[:, None] if mode == "dsd" else added)) * 0.5
    y = run(mode, layout, *tensors, epilogue=(kl.Bias(), kl.Scale()), bias=bias, scale=0.5)
    assert torch.equal(y.detach(), wanted.detach().float())
    grad = quarters(*y.shape)
    ours = torch.autograd.grad(y, (*tensors, bias), grad)
    theirs = torch.autograd.grad(wanted, (*wide, added), grad.double())
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other.float())


def test_eager_slots_without_a_block_are_0_behind_an_epilogue(gpus, seed):
    layout = layout_of("none of 2")
    tensors = [recorded(*end) for end in shapes("sdd", layout)]
    found = run("sdd", layout, *tensors, epilogue=kl.Custom("v + 2.0"))
    assert found.requires_grad and not found.any()
