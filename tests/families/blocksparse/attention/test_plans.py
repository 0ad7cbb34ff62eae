"""What kernels of attention are given, on GPUs that exist by name alone."""

import pytest
import torch

from kernlib import ahead
from kernlib.errors import CaptureError
from kernlib.families.blocksparse.attention import arguments, plans, reference
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime.plan import forget_plans
from tests.families.blocksparse.attention.cases import BF16, F16, F32, Shape, check, formula
from tests.families.blocksparse.attention.on_host import on_gpu, operands

SHAPE = Shape()
GATES = {F16: 2e-2, BF16: 8e-2}
OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"causal": True},
    "window": {"window": (9, 20)},
    "lengths": {"q_lengths": [50, 20], "kv_lengths": [33, 70]},
    "q lengths": {"q_lengths": [31, 20]},
    "kv lengths": {"kv_lengths": [31, 70]},
    "dropout": {"dropout_p": 0.25, "seed": 2**50 + 3},
}


def plain(*tensors):
    return [t.detach().as_subclass(torch.Tensor) for t in tensors]


def near(found, wanted, dtype=F16) -> None:
    check(found.detach().as_subclass(torch.Tensor), wanted.detach(), GATES[dtype])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("features, values", [(8, 5), (16, 32), (40, 24), (17, 16)])
def test_values_and_gradients(name, features, values, kernels, seed):
    shape = SHAPE._replace(features=features, values=values)
    made, tensors = operands(shape, grad=True)
    tensors_of = {
        n: torch.tensor(x) if isinstance(x, list) else x for n, x in OPTIONS[name].items()
    }
    there = {n: on_gpu(x) if isinstance(x, torch.Tensor) else x for n, x in tensors_of.items()}
    out, lse = attention(*tensors, made, return_lse=True, **there)
    wide = [t.double().requires_grad_() for t in plain(*tensors)]
    wanted = formula(*wide, _cpu(made), **tensors_of)
    near(out, wanted[0])
    near(lse, wanted[1])
    assert out.is_contiguous() and out.dtype == F16 and lse.dtype == F32
    grads = torch.randn_like(wanted[0]), torch.randn_like(wanted[1])
    alone = wanted[1] == -torch.inf
    finite = torch.where(alone, 0.0, wanted[1])
    theirs = torch.autograd.grad((wanted[0], finite), wide, grads)
    arrived = on_gpu(grads[0].half()), on_gpu(torch.where(alone, 0.0, grads[1]).float())
    ours = torch.autograd.grad((out, lse), tensors, arrived)
    for t, other in zip(ours, theirs, strict=True):
        near(t, other, BF16)
        assert t.is_contiguous()
    assert len(kernels.problems) == 2


def _cpu(made: Layout) -> Layout:
    return Layout.from_layout(made.text, tuple(plain(*made.tensors)))


@pytest.mark.parametrize("heads", [None, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads(heads, kv_heads, kernels, seed):
    shape = SHAPE._replace(kv_heads=kv_heads)
    made, tensors = operands(shape, BF16, heads)
    near(attention(*tensors, made), formula(*plain(*tensors), _cpu(made))[0], BF16)


CAPTURED = {
    "pair": ({"bias": ("head", "row", "col")}, (4, 50, 70), lambda t: t),
    "all": ({"bias": ("batch", "head", "row", "col")}, (2, 4, 50, 70), lambda t: t),
    "rows": ({"bias": ("batch", "row")}, (2, 50), lambda t: t[:, None, :, None]),
    "columns": ({"bias": ("col", "head")}, (70, 4), lambda t: t.T[:, None]),
    "head": ({"bias": "head"}, (4,), lambda t: t[:, None, None]),
    "one": ({"bias": ()}, (), lambda t: t),
    "broadcast": ({"bias": ("batch", "row", "col")}, (2, 1, 70), lambda t: t[:, None]),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_tensors(name, kernels, seed):
    axes, size, arranged = CAPTURED[name]
    made, tensors = operands(SHAPE, grad=True)
    bias = on_gpu(torch.randn(size)).requires_grad_()
    kernels.function = lambda v, captured: v * 0.5 + captured[0]
    out = attention(*tensors, made, score="v * 0.5 + bias", axes=axes, bias=bias)
    wide = [t.double().requires_grad_() for t in plain(*tensors, bias)]
    wanted, _ = formula(*wide[:3], _cpu(made), score=lambda v, *places: v * 0.5 + arranged(wide[3]))
    near(out, wanted)
    grad = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, wide, grad)
    ours = torch.autograd.grad(out, (*tensors, bias), on_gpu(grad.half()))
    for t, other in zip(ours, theirs, strict=True):
        assert t.shape == other.shape
        near(t, other, BF16)


def test_operands_are_read_in_place_where_kernels_can(kernels, seed):
    shape = SHAPE._replace(features=16, values=32)
    made, tensors = operands(shape)
    whole = on_gpu(torch.randn(2, 50, 4, 64).half())
    inside = whole.transpose(1, 2)[..., 16:32]  # of a projection of several
    wanted, _ = formula(*plain(inside, *tensors[1:]), _cpu(made))
    near(attention(inside, *tensors[1:], made), wanted)
    assert kernels.problems[-1].q[:3] == (50 * 256, 64, 256)
    for wrong in (whole.transpose(1, 2)[..., 3:19], whole.transpose(1, 2)[..., :32:2]):
        wanted, _ = formula(*plain(wrong, *tensors[1:]), _cpu(made))
        near(attention(wrong, *tensors[1:], made), wanted)
        assert kernels.problems[-1].q[:3] == (4 * 50 * 16, 50 * 16, 16)
    one = tensors[1][:, :1].expand(-1, 4, -1, -1)
    attention(tensors[0], one, tensors[2][:, :1].expand(-1, 4, -1, -1), made)
    assert kernels.problems[-1].k.head == 0


def test_out_is_written_in_place_where_kernels_can(kernels, seed):
    shape = SHAPE._replace(features=16, values=32)
    made, tensors = operands(shape)
    wanted, _ = formula(*plain(*tensors), _cpu(made))
    whole = on_gpu(torch.zeros(2, 50, 4, 64).half())
    out = whole.transpose(1, 2)[..., 16:48]
    version = out._version
    assert attention(*tensors, made, out=out) is out and out._version > version
    near(out, wanted)
    assert kernels.problems[-1].out[:3] == (50 * 256, 64, 256)
    assert not whole[..., :16].any() and not whole[..., 48:].any()
    out = whole.transpose(1, 2)[..., 1:33]
    assert attention(*tensors, made, out=out) is out
    near(out, wanted)
    assert kernels.problems[-1].out[:3] == (4 * 50 * 32, 50 * 32, 32)


def test_a_plan_serves_all_contents_and_numbers(kernels, gpus, seed):
    made, tensors = operands(SHAPE)
    for scale, window, mask in ((0.5, 3, 0.2), (2, (9, None), 0.8)):
        attention(*tensors, made, scale=scale, window=window)
        made.tensors[0].copy_(on_gpu(SHAPE.layout(density=mask).tensors[0]))
        near(attention(*tensors, made, scale=scale, window=window),
             formula(*plain(*tensors), _cpu(made), scale=scale,
                     window=(window, window) if window == 3 else (9, 2**30))[0])  # fmt: skip
    assert len(kernels.problems) == 1 and len(gpus.launches) == 4
    on_device = on_gpu(torch.tensor(0.5))
    near(attention(*tensors, made, scale=on_device),
         formula(*plain(*tensors), _cpu(made), scale=0.5)[0])  # fmt: skip
    assert kernels.numbers[-1]["scale"] == (0.0, on_device.data_ptr())


def test_a_recorded_call_whose_plan_is_there_is_not_checked_again(kernels, monkeypatch, seed):
    made, tensors = operands(SHAPE, grad=True)
    scale = on_gpu(torch.tensor(0.3))

    def step() -> list[torch.Tensor]:
        y = attention(*tensors, made, scale=scale, causal=True, kv_lengths=lengths)
        return [*torch.autograd.grad(y, tensors, torch.ones_like(y)), y]

    lengths, checks = on_gpu(torch.tensor([33, 70])), []
    check = arguments.check_operands
    monkeypatch.setattr(
        arguments, "check_operands", lambda *given: checks.append(1) or check(*given)
    )
    first = step()
    count = len(checks)
    assert count > 0
    for found, wanted in zip(step(), first, strict=True):
        assert plain(found)[0].equal(plain(wanted)[0])
    assert len(checks) == count
    with pytest.raises(RuntimeError, match=r"^out takes no result whose gradient is recorded"):
        attention(*tensors, made, causal=True, kv_lengths=lengths, out=torch.empty_like(first[3]))
    with pytest.raises(ValueError, match=r"^k must have batch and features"):
        attention(tensors[0], tensors[1][:1], tensors[2], made, causal=True, kv_lengths=lengths)
    scale.requires_grad_()
    with pytest.raises(RuntimeError, match=r"^scale requires a gradient"):
        step()


def test_a_seed_may_lie_on_the_device(kernels, seed):
    made, tensors = operands(SHAPE)
    state = on_gpu(torch.tensor(77))
    for _ in range(2):
        near(attention(*tensors, made, dropout_p=0.5, seed=state),
             formula(*plain(*tensors), _cpu(made), dropout_p=0.5, seed=int(state))[0])  # fmt: skip
        state += 1
    assert len(kernels.problems) == 1


def test_lse_is_computed_where_it_is_wanted(kernels, seed):
    made, tensors = operands(SHAPE)
    attention(*tensors, made)
    attention(*tensors, made, return_lse=True)
    assert len(kernels.problems) == 2
    tensors[0].requires_grad_()
    attention(*tensors, made).sum()
    assert len(kernels.problems) == 2  # as the last one


def test_a_plan_without_a_gradient_of_lse_serves_none_that_has_one(kernels, seed):
    made, tensors = operands(SHAPE, grad=True)
    made.tensors[0].copy_(on_gpu(SHAPE.layout(density=1.0).tensors[0]))
    results = attention(*tensors, made, return_lse=True)
    wide = [t.double().requires_grad_() for t in plain(*tensors)]
    wanted = formula(*wide, _cpu(made))
    grads = [torch.randn_like(t) for t in wanted]
    arrived = [on_gpu(grads[0].half()), on_gpu(grads[1].float())]
    for count in (1, 2, 1):
        theirs = torch.autograd.grad(wanted[:count], wide, grads[:count], retain_graph=True)
        ours = torch.autograd.grad(results[:count], tensors, arrived[:count], retain_graph=True)
        for t, other in zip(ours, theirs, strict=True):
            near(t, other, BF16)
    assert len(kernels.problems) == 3  # the product, and two gradients


def test_gradients_of_gradients_are_torch_s(kernels, monkeypatch, seed):
    made, tensors = operands(SHAPE, grad=True)
    monkeypatch.setattr(plans, "torch", torch)
    y = attention(*tensors, made)
    calls = []
    monkeypatch.setattr(reference, "attention", _noted(reference.attention, calls))
    found = torch.autograd.grad(y.float().square().sum(), tensors, create_graph=True)
    assert len(calls) == 1 and all(t.requires_grad for t in found)


def _noted(function, calls: list):
    def run(descriptor, operands, options, captured):
        calls.append(descriptor)
        layout, *tensors = operands
        cpu = _cpu(layout), *(t.as_subclass(torch.Tensor) for t in tensors)
        return function(descriptor, cpu, options, captured)

    return run


def test_a_scale_in_host_memory_is_refused_while_a_graph_is_captured(kernels, gpus):
    made, tensors = operands(SHAPE)
    ahead.prepare(BlockSparseAttention(), made, *tensors, scale=torch.tensor(2.0))
    gpus.capturing = True
    with pytest.raises(CaptureError, match="scale is in host memory"):
        attention(*tensors, made, scale=torch.tensor(2.0))


def test_an_empty_result_launches_nothing(kernels, gpus):
    made, tensors = operands(SHAPE._replace(batch=0))
    assert attention(*tensors, made).shape == (0, 4, 50, 5) and not gpus.launches
    made, tensors = operands(SHAPE._replace(queries=0), grad=True)
    y = attention(*tensors, made)
    found = torch.autograd.grad(y, tensors, torch.zeros_like(y))
    assert not gpus.launches
    assert all(t.shape == own.shape and not t.any() for t, own in zip(found, tensors, strict=True))


def test_kernels_that_there_are_take_a_call(gpus, seed):
    made, tensors = operands(SHAPE, grad=True)
    bias = on_gpu(torch.randn(50, 70)).requires_grad_()
    y = attention(*tensors, made, causal=True, score="v + bias", bias=bias)
    assert len(gpus.launches) == 1 and y.shape == (2, 4, 50, 5)
    found = torch.autograd.grad(y, (*tensors, bias), on_gpu(torch.ones(y.shape).half()))
    assert [t.shape for t in found] == [t.shape for t in (*tensors, bias)]
    assert len(gpus.launches) > 2


# The mask as a function of row and column, whether it is causal, and else its window.
WINDOWS = {
    "col <= row": (lambda i, j: j <= i, True, (2**30, 0)),
    "row - 3 <= col <= row": (lambda i, j: (i - 3 <= j) & (j <= i), False, (3, 0)),
    "abs(row - col) <= 7": (lambda i, j: (i - j).abs() <= 7, False, (7, 7)),
    "col >= row + 2": (lambda i, j: j >= i + 2, False, (-2, 2**30)),
}


@pytest.mark.parametrize("mask", WINDOWS)
def test_what_of_a_mask_is_a_window_decides_of_tiles(mask, kernels, seed):
    function, is_causal, window = WINDOWS[mask]
    made, tensors = operands(SHAPE)
    wanted, _ = formula(*plain(*tensors), _cpu(made), mask=lambda b, h, i, j: function(i, j))
    near(attention(*tensors, made, mask=mask), wanted)
    score = kernels.problems[-1].score
    assert not score.has_mask and not score.text
    assert (score.causal, score.window) == (is_causal, not is_causal)
    attention(*tensors, made, mask=mask, window=(5, 1))
    for given, sides in zip(kernels.numbers, (window, map(min, window, (5, 1))), strict=True):
        assert tuple(given[name][0] for name in ("left", "right")) == tuple(sides)


def test_the_rest_of_a_mask_is_one(kernels, seed):
    made, tensors = operands(SHAPE)
    keep = on_gpu(torch.ones(70, dtype=torch.bool))
    options = {"mask": "col <= row and keep", "axes": {"keep": "col"}, "keep": keep}
    attention(*tensors, made, **options)
    score = kernels.problems[-1].score
    assert score.causal and score.has_mask and "keeps" in score.text


def test_lengths_out_of_range_are_cut_and_found_by_debug(kernels, gpus, seed, capsys):
    """On a GPU nobody waits to look at them."""
    made, tensors = operands(SHAPE)
    far = {
        "q_lengths": on_gpu(torch.tensor([2**31, -3])),
        "kv_lengths": on_gpu(torch.tensor([71, 70])),
    }
    near(attention(*tensors, made, **far),
         formula(*plain(*tensors), _cpu(made), q_lengths=torch.tensor([50, 0]),
                 kv_lengths=torch.tensor([70, 70]))[0])  # fmt: skip
    for _ in range(2):  # of a plan that is there, and of none
        with pytest.raises(
            ValueError, match=r"^q_lengths must be from 0 to the 50 queries, got -3"
        ):
            attention(*tensors, made, debug=True, **far)
        forget_plans()
    with pytest.raises(ValueError, match=r"^kv_lengths must be from 0 to the 70 keys, got 71"):
        attention(*tensors, made, debug=True, kv_lengths=far["kv_lengths"])
    gpus.capturing = True
    far["kv_lengths"].fill_(-1)
    with pytest.raises(CaptureError):  # which no look at them precedes
        attention(*tensors, made, debug=True, kv_lengths=far["kv_lengths"])
