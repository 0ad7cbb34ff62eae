"""Block-sparse products inside of transforms of torch.func, in forward mode, compiled and under
autocast. What every operation promises there is in ``tests/contract/library``."""

import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import kernlib as kl
from kernlib.families.blocksparse import operators
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from tests.families.blocksparse.cases import (
    MODES,
    TURNS,
    assert_near,
    formula,
    layout_of,
    operands,
    randn,
    run,
)

MODE = pytest.mark.parametrize("mode", MODES)
TURN = pytest.mark.parametrize("turned", TURNS, ids=str)
NAME = pytest.mark.parametrize("name", ["wide", "heads", "none of 2"])
MAPPED = [(True, False), (False, True), (True, True)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """No program of another test."""
    yield
    torch._dynamo.reset()


def close(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def by_operator(mode, layout, a, b, turned):
    made = BlockSparseMatmul(mode, transpose_a=turned[0], transpose_b=turned[1])
    return operators.multiply(made, layout, a, b)


# Transforms of torch.func.


@NAME
@MODE
@TURN
@pytest.mark.parametrize("mapped", MAPPED, ids=str)
def test_vmap_is_the_batched_result(mapped, turned, mode, name, seed):
    layout = layout_of(name)
    for leads in (((), ()), ((2,), ()), ((3, 1), (2,))):
        ours = [((4,) if on else ()) + lead for on, lead in zip(mapped, leads, strict=True)]
        tensors = operands(mode, layout, turned, size=2, leads=ours)
        each = [t if on else [t] * 4 for on, t in zip(mapped, tensors, strict=True)]
        wanted = [formula(mode, layout, *pair, turned) for pair in zip(*each, strict=True)]
        for place, way in itertools.product((0, 1, -1), (run, by_operator)):
            given = [
                t.movedim(0, place) if on else t for t, on in zip(tensors, mapped, strict=True)
            ]
            dims = tuple(place if on else None for on in mapped)
            found = torch.vmap(lambda a, b, way=way: way(mode, layout, a, b, turned), in_dims=dims)(
                *given
            )
            close(found, torch.stack(wanted))


@MODE
def test_vmap_of_vmap_and_of_an_epilogue(mode, seed):
    layout = layout_of("heads")
    a, b = operands(mode, layout, leads=((2,), (3,)))

    def function(a, b):
        return run(mode, layout, a, b, epilogue=kl.Custom("tanh(v)"))

    nested = torch.vmap(torch.vmap(function, (None, 0)), (0, None))
    wanted = formula(mode, layout, a[:, None], b[None]).tanh()
    close(nested(a, b), wanted)


def test_vmap_over_a_bias(seed):
    layout = layout_of("wide")
    values, b = operands("dsd", layout)
    bias = randn(4, 32)
    found = torch.vmap(lambda t: dsd(values, b, layout, epilogue=kl.Bias(), bias=t))(bias)
    close(found, formula("dsd", layout, values, b) + bias[..., None])
    with pytest.raises(NotImplementedError, match=r"torch\.vmap over parameters of"):
        made = BlockSparseMatmul("dsd", epilogue=kl.Bias())
        torch.vmap(lambda t: operators.multiply(made, layout, values, b, t))(bias)


@MODE
@TURN
def test_grad_and_jacobians(turned, mode, seed):
    layout = Layout([[1, 0], [0, 1]], 16, 3)
    tensors = operands(mode, layout, turned, size=2)

    def ours(*t):
        return run(mode, layout, *t, turned)[..., :3, :2]

    def theirs(*t):
        return formula(mode, layout, *t, turned)[..., :3, :2]

    for place in range(2):
        found, wanted = (
            torch.func.grad(lambda *t, f=f: f(*t).square().sum(), argnums=place)(*tensors)
            for f in (ours, theirs)
        )
        close(found, wanted)
        backward = torch.func.jacrev(ours, argnums=place)(*tensors)
        close(backward, torch.func.jacrev(theirs, argnums=place)(*tensors))


@MODE
def test_forward_mode_is_not_dropped(mode, seed):
    layout = layout_of("heads")
    a, b = operands(mode, layout)
    ta, tb = operands(mode, layout)
    wanted = formula(mode, layout, ta, b) + formula(mode, layout, a, tb)
    y, found = torch.func.jvp(lambda *t: run(mode, layout, *t), (a, b), (ta, tb))
    close(y, formula(mode, layout, a, b))
    close(found, wanted)
    forward = torch.autograd.forward_ad
    for recording in (False, True):
        with forward.dual_level(), torch.set_grad_enabled(recording):
            y = run(mode, layout, forward.make_dual(a, ta), forward.make_dual(b, tb))
            close(forward.unpack_dual(y).tangent, wanted)


@MODE
def test_gradients_of_each_entry_of_a_batch(mode, seed):
    layout = layout_of("wide")
    a, b = operands(mode, layout, leads=((), (3,)))

    def loss(a, b):
        return run(mode, layout, a, b).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))(a, b)
    leaf = a.clone().requires_grad_()
    formula(mode, layout, leaf, b).square().sum().backward()
    close(each.sum(0), leaf.grad)


@pytest.mark.few(by="mode")
@pytest.mark.parametrize("way", [run, by_operator])
@pytest.mark.parametrize("name", ["plain", "heads"])
@MODE
def test_batches_of_gradients(mode, name, way, seed):
    layout = layout_of(name)
    tensors = operands(mode, layout, grad=True)
    y = way(mode, layout, *tensors, (False, False))
    grads = randn(4, *y.shape)
    found = torch.autograd.grad(y, tensors, grads, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, tensors, g, retain_graph=True) for g in grads]
    close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))


@MODE
def test_what_no_block_meets_is_not_read_inside_of_vmap_either(mode, seed):
    layout = Layout([[1, 0], [0, 0]], 16, 2)
    a, b = operands(mode, layout, leads=((3,), ()))
    wanted = formula(mode, layout, a, b)
    if mode == "sdd":
        a[:, 16:], b[:, 16:] = math.nan, math.inf
    else:
        dense, values = (b, a) if mode == "dsd" else (a, b)
        (dense if mode == "dsd" else dense.mT)[..., 16:, :] = math.nan
        values[..., 1, :, :] = math.nan
    found = torch.vmap(lambda t: run(mode, layout, t, b))(a)
    close(found, wanted)


# Compiled calls.


def test_a_layout_that_is_written_is_no_constant(seed):
    """One program reads the contents of each call."""
    layout = Layout([[1, 0, 1], [0, 1, 0]], 16)
    counter = CompileCounterWithBackend("aot_eager")
    made = torch.compile(lambda v, b: dsd(v, b, layout), backend=counter, fullgraph=True)
    values, b = operands("dsd", layout)
    for mask in ([[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [1, 0, 0]], [[0, 0, 0], [0, 0, 1]]):
        layout.update_(torch.tensor(mask))
        close(made(values, b), formula("dsd", layout, values, b))
    assert counter.frame_count == 1


# Autocast.


@pytest.mark.parametrize("recording", [False, True])
@MODE
def test_autocast_casts_all_but_float64(mode, recording, seed):
    layout = layout_of("wide")
    a, b = operands(mode, layout, dtype=torch.float32, grad=recording)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(mode, layout, a, b)
        mixed = run(mode, layout, a, b.half())
        wide = run(mode, layout, a.double(), b.double())
    assert (y.dtype, mixed.dtype, wide.dtype) == (*[torch.bfloat16] * 2, torch.float64)
    assert y.requires_grad is recording
    wanted = formula(mode, layout, a.bfloat16(), b.bfloat16())
    assert_near(y.detach(), wanted.detach())
    if recording:
        y.float().square().sum().backward()
        leaves = [t.detach().double().requires_grad_() for t in (a, b)]
        formula(mode, layout, *leaves).square().sum().backward()
        for ours, theirs in zip((a, b), leaves, strict=True):
            assert ours.grad.dtype == torch.float32
            assert (ours.grad - theirs.grad).norm() < 3e-2 * theirs.grad.norm()


def test_autocast_casts_a_bias_and_leaves_numbers(seed):
    layout = layout_of("wide")
    values, b = operands("dsd", layout, dtype=torch.float32)
    bias, scale = randn(32, dtype=torch.float32), torch.tensor(0.5)
    ends = {"epilogue": (kl.Bias(), kl.Scale()), "bias": bias, "scale": scale}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = dsd(values, b, layout, **ends)
    assert y.dtype == torch.bfloat16
    wanted = formula("dsd", layout, values.bfloat16(), b.bfloat16())
    assert_near(y, 0.5 * (wanted + bias.bfloat16().double()[:, None]))


def test_an_out_under_autocast_is_the_cast_ones(seed):
    layout = layout_of("wide")
    a, b = operands("sdd", layout, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.zeros(layout.capacity, *layout.block, dtype=torch.bfloat16)
        assert sdd(a, b, layout, out=out) is out
        with pytest.raises(TypeError, match=r"out must be torch\.bfloat16"):
            sdd(a, b, layout, out=out.float())
        memory = torch.zeros(4096)
        with pytest.raises(ValueError, match="out shares memory with a"):
            sdd(memory[:160].view(32, 5), b, layout, out=memory[:2048].view(out.shape))
