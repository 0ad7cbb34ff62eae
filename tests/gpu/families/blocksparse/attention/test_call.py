"""Block-sparse attention as it is called on the GPU, against float64: with every option, in graphs,
by torch.compile, and by torch where no kernel takes it."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, attention
from tests.families.blocksparse.attention.cases import BF16, F16, F32, F64, Shape, check, formula
from tests.families.blocksparse.attention.options import NAMES, option
from tests.gpu.watched import capture, launches, nothing_waits

SHAPE = Shape(2, 4, 2, 200, 300, 64, 64, (64, 64))
SMALL = Shape()  # widths that are padded
VALUES = {F16: 4e-3, BF16: 3e-2, F32: 1e-5, F64: 1e-12}
GRADIENTS = {F16: 1e-2, BF16: 8e-2}


def there(value):
    """Tensors and layouts on the GPU, others as they are."""
    return value.to("cuda") if isinstance(value, (torch.Tensor, Layout)) else value


def moved(given: dict) -> dict:
    return {name: there(value) for name, value in given.items()}


def launched(call) -> tuple:
    """What a call gives, and what of it kernels were launched for."""
    with launches() as found:
        return call(), found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_options(name, dtype, seed):
    given, tensors = option(name, SHAPE, F32 if dtype in GRADIENTS else dtype), SHAPE.tensors(dtype)
    for heads in (None, SHAPE.heads, SHAPE.batch * SHAPE.heads):
        made = SHAPE.layout(heads, 0.4)
        call = [there(t) for t in (*tensors, made)]
        found = attention(*call, return_lse=True, **moved(given.call))
        wanted = formula(*tensors, made, **given.formula)
        for ours, theirs in zip(found, wanted, strict=True):
            check(ours.cpu(), theirs, VALUES[dtype])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [SHAPE, SMALL], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_gradients(name, shape, dtype, seed):
    given, made = option(name, shape, F32), shape.layout(4, 0.4)
    tensors = shape.tensors(dtype)
    wide = [t.double().requires_grad_() for t in tensors]
    floats = {n: t for n, t in given.captured.items() if t.is_floating_point()}
    if given.text.get("score") is None:
        floats = {}
    own = {n: t.double().requires_grad_() for n, t in floats.items()}
    named = given.captured | own
    functions = {n: make(named) for n, make in given.functions.items()}
    wanted = formula(*wide, made, **given.both, **functions)
    leaves = [there(t).requires_grad_() for t in tensors]
    captured = {n: there(t).requires_grad_() for n, t in floats.items()}
    rest = moved(given.call) | captured
    found = attention(*leaves, there(made), return_lse=True, **rest)
    grads = [torch.randn_like(t) for t in wanted]
    alone = wanted[1] == -torch.inf
    grads[1] = torch.where(alone, 0.0, grads[1])
    results = wanted[0], torch.where(alone, 0.0, wanted[1])
    theirs = torch.autograd.grad(results, (*wide, *own.values()), grads)
    arrived = [there(g).to(y.dtype) for g, y in zip(grads, found, strict=True)]
    ours = torch.autograd.grad(found, (*leaves, *captured.values()), arrived)
    for t, other in zip(ours, theirs, strict=True):
        check(t.cpu(), other, GRADIENTS[dtype])


CELLS = ("floor(row / 41.0) == floor(col / 41.0)", "0.1 * row - 0.1 * col >= 0")


@pytest.mark.parametrize("mask", (*CELLS, "floor(41 / (col + 41)) == 1", "41 * row / 41 >= row"))
@pytest.mark.parametrize("dtype", [BF16, F64], ids=str)  # kernels, and torch
def test_borders_of_a_mask_are_those_of_a_cpu(mask, dtype, seed):
    """Which reciprocals and sums of products that are not rounded would move."""
    tensors, made = SHAPE.tensors(dtype), SHAPE.layout(None, 0.9)
    found = attention(*map(there, (*tensors, made)), mask=mask, return_lse=True)[1]
    wanted = attention(*tensors, made, mask=mask, return_lse=True)[1]
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SHAPE, SMALL], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", GRADIENTS, ids=str)
def test_rows_of_the_least_number_have_weights_of_one_size(dtype, kind, shape, seed):
    """As masks of it are added: their results are means of v, their gradients those of these."""
    made, tensors, least = shape.layout(4, 0.4), shape.tensors(dtype), torch.finfo(kind).min
    mask = torch.zeros(shape.batch, 1, shape.queries, shape.keys, dtype=kind)
    mask[..., ::3] = mask[:, :, -2:] = least
    wide = [t.double().requires_grad_() for t in (*tensors, mask)]
    wanted, lse = formula(*wide[:3], made, score=lambda v, *_: v + wide[3])
    leaves = [there(t).requires_grad_() for t in (*tensors, mask)]
    q, k, v, bias = leaves
    found = attention(q, k, v, there(made), score="v + bias", bias=bias, return_lse=True)
    check(found[0].cpu(), wanted, VALUES[dtype])
    rows = slice(0, shape.queries - 2)
    check(found[1][..., rows].cpu(), lse[..., rows], VALUES[dtype])
    assert found[1][..., -2:].eq(least).all()
    grad = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, wide, grad)
    ours = torch.autograd.grad(found[0], leaves, there(grad).to(dtype))
    for t, other in zip(ours, theirs, strict=True):
        check(t.cpu(), other, GRADIENTS[dtype])


@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": -0.3}], ids=["", "causal"])
@pytest.mark.parametrize("equal", [False, True], ids=["", "equal keys"])
@pytest.mark.parametrize("shape", [SHAPE, SMALL], ids=["whole", "padded"])
def test_large_logits_are_told_apart(shape, equal, options, seed):
    made, (q, k, v) = shape.layout(4, 0.4), shape.tensors(BF16)
    q, k = q * 3e4, k * 3e4
    k = k[:, :, :1].expand_as(k).contiguous() if equal else k
    found = attention(*map(there, (q, k, v, made)), return_lse=True, **options)
    for ours, theirs in zip(found, formula(q, k, v, made, **options), strict=True):
        check(ours.cpu(), theirs, VALUES[BF16])


def test_kernels_compute_half_types(seed):
    made, tensors = there(SHAPE.layout()), [there(t) for t in SHAPE.tensors(F16)]
    assert launched(lambda: attention(*tensors, made))[1]
    assert not launched(lambda: attention(*(t.float() for t in tensors), made))[1]


def test_the_same_bits(seed):
    made, tensors = there(SHAPE.layout(8)), [there(t).requires_grad_() for t in SHAPE.tensors(BF16)]
    runs = []
    for _ in range(2):
        y = attention(*tensors, made, causal=True, dropout_p=0.1, seed=3)
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), tensors)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


def test_nobody_waits_and_a_graph_follows_what_changes(seed):
    made, tensors = there(SHAPE.layout(spare=20)), [there(t) for t in SHAPE.tensors(F16)]
    mask, state = made.mask(), torch.tensor(5, device="cuda")
    lengths = torch.tensor([300, 200], device="cuda")
    descriptor = kl.BlockSparseAttention(lengths=True, dropout=True)
    given = {"kv_lengths": lengths, "dropout_p": 0.2, "seed": state, "scale": state / 20}
    kl.prepare(descriptor, made, *tensors, **given)
    kl.run_kernel(descriptor, made, *tensors, **given)
    made.update_(mask)
    with nothing_waits():
        kl.run_kernel(descriptor, made, *tensors, **given)
    with capture() as graph:
        made.update_(mask)
        found = kl.run_kernel(descriptor, made, *tensors, **given)
    for step in range(3):
        mask.copy_(torch.rand(mask.shape, device="cuda") < 0.4)
        state.fill_(step)
        lengths.fill_(150 + step)
        graph.replay()
        wanted, _ = formula(
            *(t.cpu() for t in tensors), made.cpu(), kv_lengths=lengths.cpu(), dropout_p=0.2,
            seed=step, scale=float(given["scale"]),
        )  # fmt: skip
        check(found.cpu(), wanted, VALUES[F16])


def test_seeds_are_drawn_anew_in_replays(seed):
    made, tensors = there(SHAPE.layout()), [there(t) for t in SHAPE.tensors(F16)]
    attention(*tensors, made, dropout_p=0.5)
    with capture() as graph:
        found = attention(*tensors, made, dropout_p=0.5)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(found.clone())
    assert not torch.equal(*seen)


def test_compiled_calls_are_the_same(seed):
    made, tensors = there(SHAPE.layout()), [there(t).requires_grad_() for t in SHAPE.tensors(BF16)]
    slope = torch.rand(4, device="cuda", requires_grad=True)

    def call(q, k, v, slope):
        score = "v - slope * abs(row - col)"
        return attention(q, k, v, made, score=score, axes={"slope": "head"}, slope=slope)

    run = torch.compile(call, fullgraph=True)
    inputs = *tensors, slope
    found, wanted = run(*inputs), call(*inputs)
    assert torch.equal(found, wanted)
    grad = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(y, inputs, grad) for y in (found, wanted)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_gradients_of_gradients(seed):
    made, tensors = SMALL.layout(), SMALL.tensors(F16)
    leaves = [there(t).requires_grad_() for t in tensors]
    wide = [t.double().requires_grad_() for t in tensors]
    found = []
    for y, inputs in ((attention(*leaves, there(made)), leaves), (formula(*wide, made)[0], wide)):
        first = torch.autograd.grad(y.double().square().sum(), inputs, create_graph=True)
        loss = sum(t.double().square().sum() for t in first)
        found.append(torch.autograd.grad(loss, inputs))
    for ours, theirs in zip(*found, strict=True):
        check(ours.cpu(), theirs, 5e-2)


def test_lengths_out_of_range_are_cut_and_found_by_debug(seed):
    made, tensors = there(SHAPE.layout()), [there(t) for t in SHAPE.tensors(F16)]
    far = torch.tensor([2**31, -5], device="cuda")
    near = torch.tensor([300, 0], device="cuda")
    found = attention(*tensors, made, kv_lengths=far)
    assert found.equal(attention(*tensors, made, kv_lengths=near))
    with pytest.raises(ValueError, match=r"^kv_lengths must be from 0 to the 300 keys, got -5"):
        attention(*tensors, made, kv_lengths=far, debug=True)


def test_what_lies_behind_lengths_reaches_nothing(seed):
    made, (q, k, v) = there(SHAPE.dense()), (there(t) for t in SHAPE.tensors(F16))
    lengths = {"q_lengths": torch.tensor([200, 70], device="cuda"),
               "kv_lengths": torch.tensor([290, 33], device="cuda")}  # fmt: skip
    wanted = attention(q, k, v, made, return_lse=True, **lengths)
    q[1, :, 70:], k[1, :, 33:], v[1, :, 33:] = (torch.nan,) * 3
    leaves = [t.requires_grad_() for t in (q, k, v)]
    found = attention(*leaves, made, return_lse=True, **lengths)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert not found[0][1, :, 70:].any() and (found[1][1, :, 70:] == -torch.inf).all()
    for t in torch.autograd.grad(found[0].float().sum(), leaves):
        assert t.isfinite().all()


def test_autocast(seed):
    made, tensors = there(SHAPE.layout()), [there(t) for t in SHAPE.tensors(F32)]
    with torch.autocast("cuda", BF16):
        found, names = launched(lambda: attention(*tensors, made))
    assert found.dtype == BF16 and names


@pytest.mark.parametrize("dtype", VALUES, ids=str)
def test_a_scale_that_is_no_number_is_seen(dtype, seed):
    """Rows that something is left of are NaN, and so is their log-sum-exp."""
    tensors = SHAPE.tensors(dtype)
    made = Layout(torch.eye(4, 5, dtype=torch.bool), SHAPE.block)
    call = [there(t) for t in (*tensors, made)]
    scale = torch.tensor(float("nan"), device="cuda")
    out, lse = attention(*call, return_lse=True, scale=scale, mask="row >= 64")
    assert out[:, :, 64:].isnan().all() and lse[:, :, 64:].isnan().all()
