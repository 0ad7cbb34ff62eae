"""Reductions of kernel matrices in compiled, traced and recorded calls on CPU tensors are the eager
ones, and so are their gradients."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import kernlib as kl
import kernlib.families.pairwise.reductions.library as library
from tests.support.dynamo_messages import said

M, N, K, L, C = 5, 7, 3, 2, 4
GAUSSIAN, SYMMETRIC = kl.gaussian(), kl.gaussian(symmetric=True)
SIGNED = kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("tanh(v / s)", ("s",)))


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def points(*shape, grad=True, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def width(*values):
    return torch.tensor(values if len(values) > 1 else values[0], requires_grad=True)


CASES = {  # a function, and its tensors
    "vector": (lambda a, b, v: kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=2.0),
               ((M, K), (N, K), (N,)), ()),
    "columns": (lambda a, b, v, w: kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=w),
                ((M, K), (N, K), (N, C)), (2.0,)),
    "batch": (lambda a, b, v, w: kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=w),
              ((L, M, K), (N, K), (L, N, C)), ((1.0, 2.0),)),
    "batch of v": (lambda a, b, v: kl.kernel_matmul(kl.matern52(), a, b, v, bandwidth=2),
                   ((M, K), (N, K), (L, N, C)), ()),
    "symmetric": (lambda a, v: kl.kernel_matmul(SYMMETRIC, a, None, v, bandwidth=2.0,
                                                regularization=0.5), ((M, K), (M, C)), ()),
    "signed": (lambda a, b, v, s: kl.kernel_matmul(SIGNED, a, b, v, s=s),
               ((M, K), (N, K), (N, C)), (2.0,)),
    "mapped": (lambda a, b, v, f: kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=2.0, feature_map=f),
               ((M, K), (N, K), (N, C), (K,)), ()),
    "sum": (lambda a, b, w: kl.kernel_sum(kl.laplace_l1(), a, b, bandwidth=w),
            ((M, K), (L, N, K)), (2.0,)),
    "logsumexp": (lambda a, b, w: kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=w),
                  ((M, K), (N, K)), (2.0,)),
    "offsets": (lambda a, b: kl.kernel_sum(GAUSSIAN, a, b, bandwidth=2.0, regularization=3.0,
                                           row_offset=2, col_offset=1), ((M, K), (N, K)), ()),
    "min": (lambda a, b, w: kl.kernel_min(GAUSSIAN, a, b, bandwidth=w)[0],
            ((M, K), (L, N, K)), ((1.0, 2.0),)),
    "topk": (lambda a, b, w: kl.kernel_topk(GAUSSIAN, a, b, 3, bandwidth=w, regularization=w)[0],
             ((M, K), (N, K)), (2.0,)),
}  # fmt: skip


def made(case):
    function, shapes, numbers = CASES[case]
    values = [width(*x) if isinstance(x, tuple) else width(x) for x in numbers]
    return (lambda *given: function(*given).sin()), [*(points(*s) for s in shapes), *values]


def gradients(function, tensors, along):
    return torch.autograd.grad(function(*tensors), tensors, along)


def close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_calls_and_gradients_are_the_eager_ones(case, backend, seed):
    function, tensors = made(case)
    wanted = function(*tensors)
    along = torch.randn(wanted.shape)
    close([compiled(function, backend)(*tensors)], [wanted])
    run = compiled(function, backend)
    close(gradients(run, tensors, along), gradients(function, tensors, along))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["columns", "sum", "topk"])
def test_inductor_takes_the_operators(case, seed):
    function, tensors = made(case)
    along = torch.randn(function(*tensors).shape)
    run = compiled(function, "inductor")
    close(gradients(run, tensors, along), gradients(function, tensors, along))


def test_a_call_is_one_operator():
    graphs = []

    def keep(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module

    a, b, v = points(M, K), points(N, K), points(N)
    compiled(lambda *t: kl.kernel_matmul(kl.l1_distance(), *t), keep)(a, b, v)
    called = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert called == [torch.ops.kernlib.pairwise_reduce.default]


def test_places_are_those_of_eager_calls(seed):
    a, b = points(L, M, K, grad=False), points(N, K, grad=False)
    calls = {
        "argmin": lambda: kl.kernel_argmin(kl.l1_distance(), a, b),
        "min": lambda: kl.kernel_min(kl.l1_distance(), a, b)[1],
        "topk": lambda: kl.kernel_topk(kl.l1_distance(), a, b, 4, True)[1],
    }
    for call in calls.values():
        assert torch.equal(compiled(call)(), call())


def test_sizes_may_be_dynamic(seed):
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, y, v, w):
        nearest, _ = kl.kernel_topk(GAUSSIAN, x, y, 2, bandwidth=w)
        return kl.kernel_matmul(GAUSSIAN, x, y, v, bandwidth=w) + nearest.sum(1, keepdim=True)

    run = compiled(function, counter, dynamic=True)
    for m, n, c in ((4, 6, 9), (8, 5, 2), (3, 7, 6)):
        tensors = points(m, K), points(n, K), points(n, c), width(2.0)
        along = torch.randn(m, c)
        close(gradients(run, tensors, along), gradients(function, tensors, along))
    assert counter.frame_count == 1


def test_half_types(seed):
    a, b, v = (points(*s, dtype=torch.bfloat16) for s in ((M, K), (N, K), (N, C)))
    function = lambda *t: kl.kernel_matmul(GAUSSIAN, *t, bandwidth=2.0)  # noqa: E731
    along = torch.randn(M, C).bfloat16()
    close([compiled(function)(a, b, v)], [function(a, b, v)])
    close(gradients(compiled(function), (a, b, v), along), gradients(function, (a, b, v), along))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_out_is_written_in_place(dtype, seed):
    a, b, v = (points(*s, grad=False).to(dtype) for s in ((M, K), (N, K), (N, C)))

    def call(a, b, v, out):
        return kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=2.0)

    out, wanted = torch.zeros(C, M).T, torch.zeros(M, C)
    assert compiled(call)(a, b, v, out).data_ptr() == out.data_ptr()
    assert torch.equal(out, call(a, b, v, wanted))
    with pytest.raises(RuntimeError, match=said("out takes no gradient")):
        compiled(call)(a.requires_grad_(), b, v, out)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_fake_tensors_have_the_shapes_of_real_ones(case, inside):
    function, tensors = made(case)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
    with mode if inside else torch.enable_grad():
        found = function(*fakes)
    wanted = function(*tensors)
    assert (found.shape, found.stride(), found.dtype) == (
        wanted.shape, wanted.stride(), wanted.dtype
    )  # fmt: skip
    with mode:
        slopes = torch.autograd.grad(found.sum(), fakes)
    assert [g.shape for g in slopes] == [t.shape for t in tensors]


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_without_a_gradient(device):
    with FakeTensorMode(), torch.device(device):
        a, b = torch.empty(L, M, K), torch.empty(N, K)
        v, out = torch.empty(N, 1), torch.empty(L, M, 1)
    low, places = kl.kernel_min(GAUSSIAN, a, b, bandwidth=2.0)
    near, which = kl.kernel_topk(GAUSSIAN, a, b, 3, bandwidth=2.0)
    assert kl.kernel_argmin(GAUSSIAN, a, b, bandwidth=2.0).shape == low.shape == (L, M)
    assert near.shape == which.shape == (L, M, 3)
    assert places.dtype == which.dtype == torch.int64
    assert kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=2.0).device == a.device
    if device == "cpu":  # torch without CUDA copies no fake tensor of it
        assert kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=2.0) is out


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_sees_forward_and_backward(tracing, seed):
    function, tensors = made("columns")
    along = torch.randn(M, C)

    def both(along, *given):
        return torch.autograd.grad(function(*given), given, along)

    graph = make_fx(both, tracing_mode=tracing)(along, *tensors)
    names = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert {
        "kernlib.pairwise_reduce.default", "kernlib.pairwise_reduce_gradient.default"
    } <= names  # fmt: skip
    fresh = [t.detach().clone().requires_grad_() for t in tensors]
    close(graph(along, *fresh), both(along, *fresh))


WRONG = {
    "v must have a row": lambda a, b: kl.kernel_matmul(GAUSSIAN, a, b, a[:, 0], bandwidth=1.0),
    "same number of feat": lambda a, b: kl.kernel_sum(GAUSSIAN, a, b[:, 1:], bandwidth=1.0),
    "needs bandwidth": lambda a, b: kl.kernel_sum(GAUSSIAN, a, b),
    "bandwidth must be greater": lambda a, b: kl.kernel_min(GAUSSIAN, a, b, bandwidth=-1.0),
    "k must be from 1 to": lambda a, b: kl.kernel_topk(GAUSSIAN, a, b, N + 1, bandwidth=1.0),
    "b is missing": lambda a, b: kl.kernel_logsumexp(GAUSSIAN, a, bandwidth=1.0),
    "v must be a tensor": lambda a, b: kl.kernel_matmul(GAUSSIAN, a, b, None, bandwidth=1.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_said_as_in_eager_calls(message):
    a, b = points(M, K, grad=False), points(N, K, grad=False)
    for run in (WRONG[message], compiled(WRONG[message])):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            run(a, b)


@pytest.mark.parametrize("reduction", ["matmul", "logsumexp"])
@pytest.mark.parametrize("numbers", [([2.0], []), ([], [2.0]), ([0.5], [[1.0, 2.0]])], ids=str)
def test_torchs_own_checks_of_operators_pass(reduction, numbers, seed):
    listed, tensors = numbers[0], [width(*x) if isinstance(x, list) else width(x)
                                   for x in numbers[1]]  # fmt: skip
    names = "epsilon bandwidth" if len(listed) == len(tensors) else "bandwidth"
    a, b = points(M, K), points(N, K)
    v = points(N, C) if reduction == "matmul" else None
    rest = (reduction, GAUSSIAN.text, names, listed, tensors, 1, 0)
    opcheck(torch.ops.kernlib.pairwise_reduce.default, (a, b, v, *rest))
    result = torch.ops.kernlib.pairwise_reduce(a, b, v, *rest).detach()
    plain = [None if t is None else t.detach() for t in (torch.randn_like(result), result, a, b, v)]
    rest = (*rest[:3], listed, [t.detach() for t in tensors], 1, 0)
    opcheck(torch.ops.kernlib.pairwise_reduce_gradient.default, (*plain, "a b", *rest))
    rest = ("topk", *rest[1:])
    opcheck(torch.ops.kernlib.pairwise_choose.default, (*plain[2:4], 2, True, *rest))


@pytest.mark.parametrize("reduction", ["matmul", "sum", "logsumexp"])
def test_gradients_of_the_operators_gradients(reduction, seed):
    a, b = points(M, K, dtype=torch.float64), points(N, K, dtype=torch.float64)
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    v = points(N, 2).double().detach().requires_grad_() if reduction == "matmul" else None
    w = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)

    def function(a, b, w, *v):
        rest = (reduction, GAUSSIAN.text, "bandwidth", [], [w], 0, 0)
        return torch.ops.kernlib.pairwise_reduce(a, b, v[0] if v else None, *rest)

    inputs = (a, b, w) if v is None else (a, b, w, v)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_none_stands_for_an_empty_list():
    """As AOTInductor passes it."""
    a, b = points(M, K, grad=False), points(N, K, grad=False)
    descriptor = kl.l1_distance()
    found = library._compute(a, b, None, "sum", descriptor.text, "", None, None, 0, 0)
    assert torch.equal(found, kl.kernel_sum(descriptor, a, b))


EAGER = """
import sys, torch
import kernlib as kl
kl.kernel_sum(kl.l1_distance(), torch.ones(2, 3), torch.ones(4, 3))
kl.kernel_min(kl.l1_distance(), torch.ones(2, 3), torch.ones(4, 3))
names = ("library", "gradients", "pairs")
here = "kernlib.families.pairwise.reductions"
print([name for name in names if f"{here}.{name}" in sys.modules])
"""


def test_an_eager_call_registers_nothing():
    run = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr
