"""Plans of block-sparse calls, on GPUs that exist only by name and whose kernels compute on the
host what a problem says."""

import itertools
from math import prod

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse import checks, plans
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.problem import Dense
from kernlib.families.blocksparse.operation import calls
from tests.architecture import golden_cases
from tests.families.blocksparse.cases import (
    LAYOUTS,
    MODES,
    TURNS,
    TYPES,
    formula,
    gpu,
    host,
    install,
    layout_of,
    layout_on_gpu,
    layout_on_host,
    memories,
    run,
    shapes,
)
from tests.support import fakes
from tests.support.fakes import OnGpu, OnSecondGpu

MODE = pytest.mark.parametrize("mode", MODES)
TURN = pytest.mark.parametrize("turned", TURNS, ids=str)
LEADS = [((), ()), ((2,), ()), ((), (3,)), ((2, 1), (3,)), ((1,), (2, 3)), ((2, 3), (2, 3))]


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    yield install(monkeypatch)
    fakes.forget()


def given(mode, layout, turned=(False, False), size=5, leads=((), ()), dtype=torch.float32):
    ends = shapes(mode, layout, turned, size)
    return tuple(gpu(*lead, *end, dtype=dtype) for lead, end in zip(leads, ends, strict=True))


def problem_of(mode, layout, a, b, turned=(False, False), out=None, epilogue=(), **parameters):
    """The problem of a call, and how its tensors are read."""
    made = BlockSparseMatmul(mode, transpose_a=turned[0], transpose_b=turned[1], epilogue=epilogue)
    call = checks.check_call(made, (layout, a, b), out, parameters)
    return plans.problem_of(call, made, (layout, a, b), out, parameters)


def equal(found, mode, layout, a, b, turned=(False, False)) -> None:
    """Sums of quarters are exact, and rounded once."""
    wanted = formula(mode, layout, host(a), host(b), turned)
    assert torch.equal(host(found), wanted.to(found.dtype))


# The problems.


def test_a_batch_of_rows_times_shared_values_is_more_columns():
    """What a layer does: x (..., R) of any leading dimensions, read once as one matrix."""
    layout = layout_on_gpu(layout_of("wide"))
    for lead in ((4,), (2, 3), (2, 1, 3)):
        a, values = given("dds", layout, leads=(lead, ()))
        problem, read = problem_of("dds", layout, a, values)
        assert (problem.batch, problem.columns) == (1, prod(lead) * 5)
        assert (problem.dense, problem.out) == (Dense(0, 0, 1, 32), Dense(0, 0, 1, 96))
        assert read == plans.Read((None, None), False)
        one = values.view(*(1,) * len(lead), *values.shape)
        assert problem_of("dds", layout, a, one) == (problem, read)


def test_batches_of_no_single_stride_are_copied():
    layout = layout_on_gpu(layout_of("wide"))
    for mode, leads, copied in (
        ("dsd", ((2, 1), (3,)), (True, True)),
        ("dds", ((3,), (2, 1)), (True, True)),
        ("sdd", ((2, 1), (3,)), (True, True)),
        ("sdd", ((1, 1), (2, 3)), (False, False)),
    ):
        a, b = given(mode, layout, leads=leads)
        problem, read = problem_of(mode, layout, a, b)
        assert problem.batch == 6 and tuple(c is not None for c in read.copies) == copied
        for t, shape in zip((a, b), read.copies, strict=True):
            assert shape is None or shape == (2, 3, *t.shape[len(leads[t is b]) :])


# Calls.


def test_the_precision_is_that_of_the_call(gpus):
    """Whatever another call of these sizes had before."""
    layout = layout_on_gpu(layout_of("plain"))
    a, b = given("sdd", layout)

    def precision(permitted, dtype=torch.float32):
        run("sdd", layout, a.to(dtype), b.to(dtype), precision=permitted)
        _, index = gpus.launches[-1].what.split()
        return gpus.lowering.problems[int(index)].precision

    assert [precision(p) for p in (None, "fp32")] == ["fp32", "fp32"]
    assert [precision(p) for p in ("tf32", "bf16")] == ["tf32", "tf32"]
    assert precision("tf32", torch.float16) == "fp32"
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert [precision(p) for p in (None, "fp32")] == ["tf32", "fp32"]
    finally:
        torch.set_float32_matmul_precision(before)
    assert precision(None) == "fp32"


@MODE
@TURN
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_call_is_its_problem(name, turned, mode, gpus, seed):
    layout = layout_on_gpu(layout_of(name))
    for dtype in TYPES.values():
        a, b = given(mode, layout, turned, dtype=dtype)
        found = run(mode, layout, a, b, turned)
        equal(found, mode, layout, a, b, turned)
        assert found.is_contiguous() and type(found) is OnGpu
    assert len(gpus.launches) == (3 if layout.capacity else 0)


@MODE
@TURN
@pytest.mark.parametrize("leads", LEADS, ids=str)
@pytest.mark.parametrize("name", ["wide", "heads"])
def test_batches_are_those_of_the_tensors(name, leads, turned, mode, seed):
    layout = layout_on_gpu(layout_of(name))
    a, b = given(mode, layout, turned, leads=leads)
    found = run(mode, layout, a, b, turned)
    equal(found, mode, layout, a, b, turned)
    assert found.is_contiguous()
    for out in outs(found):
        assert run(mode, layout, a, b, turned, out=out) is out
        assert torch.equal(host(out), host(found))


def outs(y):
    """Where a result may be written, full of what nobody wrote."""
    for _, memory in memories(torch.full_like(y, 77)):
        yield memory


@MODE
@pytest.mark.parametrize("name", ["wide", "heads"])
def test_operands_lie_anywhere(name, mode, seed):
    layout = layout_on_gpu(layout_of(name))
    for turned, leads in itertools.product(TURNS[::3], LEADS[::3]):
        a, b = given(mode, layout, turned, leads=leads)
        for (_, left), (_, right) in zip(memories(a), reversed([*memories(b)]), strict=True):
            equal(run(mode, layout, left, right, turned), mode, layout, a, b, turned)
        one = a[..., :1, :].expand(a.shape), b[..., :1].expand(b.shape)
        equal(run(mode, layout, *one, turned), mode, layout, *one, turned)


@pytest.mark.parametrize("leads", LEADS, ids=str)
@MODE
def test_an_out_of_no_single_stride_is_written_by_a_copy(mode, leads, seed):
    layout = layout_on_gpu(layout_of("heads"))
    a, b = given(mode, layout, leads=leads)
    y = run(mode, layout, a, b)
    batch = y.shape[: y.dim() - 3]
    out = gpu(*(n + 1 for n in y.shape))[tuple(slice(n) for n in y.shape)]
    problem, read = problem_of(mode, layout, a, b, out=out)
    assert read.apart is (len(batch) > 1 and batch[-1] > 1 and batch[0] > 1)
    plain, _ = problem_of(mode, layout, a, b)
    if read.apart:
        assert problem == plain
    run(mode, layout, a, b, out=out)
    assert torch.equal(host(out), host(y))


EPILOGUES = {
    "bias": (kl.Bias(), kl.Gelu()),
    "scale": (kl.Scale(), kl.Custom("v + shift", ("shift",))),
    "add": (kl.Add(), kl.Scale()),
    "all": (kl.Scale("first"), kl.Add(), kl.Bias(), kl.Relu()),
}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("leads", LEADS[:4], ids=str)
@MODE
def test_an_epilogue_finishes_each_value(mode, leads, epilogue, seed):
    epilogue = EPILOGUES[epilogue]
    if mode == "sdd":
        epilogue = tuple(part for part in epilogue if not part.vectors)
    for name in ("wide", "heads"):
        layout = layout_on_gpu(layout_of(name))
        a, b = given(mode, layout, leads=leads)
        y = run(mode, layout, a, b)
        axis = -2 if mode == "dsd" else -1
        made = BlockSparseMatmul(mode, epilogue=epilogue)
        names = {n: 0.5 for n in made.parameters}
        names |= {n: gpu(y.shape[axis]) for n in made.vectors}
        for view in (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t[..., :1]):
            names |= {n: view(gpu(*y.shape)) for n in made.summands}
            found = kl.run_kernel(made, layout, a, b, **names)
            plain = {n: host(v) if isinstance(v, torch.Tensor) else v for n, v in names.items()}
            wanted = kl.run_kernel(made, layout_on_host(layout), host(a), host(b), **plain)
            torch.testing.assert_close(host(found), wanted)


def test_out_may_be_the_summand(seed):
    layout = layout_on_gpu(layout_of("wide"))
    for mode in MODES:
        a, b = given(mode, layout)
        y = run(mode, layout, a, b)
        out = gpu(*y.shape)
        wanted = host(y) + host(out)
        if mode == "sdd":
            wanted[-1] = 0
        assert run(mode, layout, a, b, epilogue=kl.Add(), y=out, beta=1, out=out) is out
        assert torch.equal(host(out), wanted)


@MODE
def test_one_plan_serves_every_content(mode, gpus, seed):
    """Nothing of a layout's contents is in a plan: it may change between calls."""
    layout = layout_on_gpu(layout_of("plain"))
    a, b = given(mode, layout)
    run(mode, layout, a, b)
    for mask in ([[0, 1, 0], [1, 0, 1]], [[0, 0, 0], [0, 0, 1]], [[0, 0, 0], [0, 0, 0]]):
        other = layout_on_gpu(Layout(mask, 16, layout.capacity))
        equal(run(mode, other, a, b), mode, other, a, b)
        for ours, theirs in zip(layout.tensors, other.tensors, strict=True):
            host(ours).copy_(host(theirs))
        equal(run(mode, layout, a, b), mode, layout, a, b)
    assert len(gpus.loads) == 1


@MODE
@pytest.mark.parametrize("name", ["none", "plain"])
def test_what_is_a_sum_of_nothing_launches_nothing(name, mode, gpus):
    layout = layout_on_gpu(layout_of(name))
    size = 0 if mode == "sdd" else 5
    if name == "none" or mode == "sdd":
        a, b = given(mode, layout, size=size)
        found = run(mode, layout, a, b)
        assert not found.any() and found.is_contiguous()
        if mode != "sdd":
            axis = -2 if mode == "dsd" else -1
            bias = gpu(found.shape[axis])
            found = run(mode, layout, a, b, epilogue=kl.Bias(), bias=bias)
            assert torch.equal(host(found).movedim(axis, -1), host(bias).expand(5, -1))
    a, b = given(mode, layout, leads=((0,), ()))
    assert run(mode, layout, a, b).numel() == 0
    for grid, turned in itertools.product(((0, 2), (2, 0), (0, 0)), TURNS):
        layout = layout_on_gpu(Layout(torch.zeros(grid, dtype=torch.bool), 16, 2))
        a, b = given(mode, layout, turned)
        equal(run(mode, layout, a, b, turned), mode, layout, a, b, turned)
    assert gpus.launches == []


@MODE
def test_a_plan_is_found_again_and_not_for_other_sizes(mode, gpus, seed):
    layout = layout_on_gpu(layout_of("heads"))
    a, b = given(mode, layout)
    run(mode, layout, a, b)
    made = BlockSparseMatmul(mode)
    plan = calls.find(made, (layout, a, b), None, {})
    assert plan is not None and plan is calls.find(made, (layout, a.clone(), b.clone()), None, {})
    assert calls.find(made, (layout, a.mT.contiguous().mT, b), None, {}) is None
    other = layout_on_gpu(Layout(layout_of("heads").mask(), 16, layout.capacity + 1))
    assert calls.find(made, (other, a, b), None, {}) is None


def test_a_layout_on_another_device_is_refused():
    layout = layout_of("plain")
    a, b = given("dsd", layout)
    for placed in (layout, layout_on_gpu(layout, OnSecondGpu)):
        with pytest.raises(ValueError, match="layout must be on the device of values, cuda:0, got"):
            run("dsd", placed, a, b)


@MODE
def test_out_must_not_share_memory_with_an_operand_or_the_layout(mode):
    layout = layout_on_gpu(layout_of("plain"))
    memory = gpu(1 << 12)
    ends = shapes(mode, layout)
    y = run(mode, layout, *(gpu(*end) for end in ends))
    for place, name in enumerate("ab"):
        operands = [gpu(*end) for end in ends]
        operands[place] = memory[: prod(ends[place])].view(ends[place])
        out = memory[1 : 1 + y.numel()].view(y.shape)
        with pytest.raises(ValueError, match=f"out shares memory with {name};"):
            run(mode, layout, *operands, out=out)


def test_kernels_of_a_described_call_are_compiled_ahead():
    """Of a layout and tensors on meta, by the public door."""
    layout = Layout(torch.ones(4, 8, dtype=torch.bool), 64).to("meta")
    half = {"dtype": torch.float16, "device": "meta"}
    values, b = torch.empty(32, 64, 64, **half), torch.empty(512, 128, **half)
    found = golden_cases.compiled(
        BlockSparseMatmul("dsd"), archs=("sm_90a",), specs=(layout, values, b)
    )
    assert found and all(spec.family == "blocksparse" for spec in found)
    softmax = kl.BlockSparseSoftmax(causal=True)
    assert golden_cases.compiled(softmax, archs=("sm_90a",), specs=(layout, values))
    with pytest.raises(TypeError, match="specs must be the tensors of one call, got Tensor, int"):
        golden_cases.compiled(softmax, archs=("sm_90a",), specs=(values, 3))
