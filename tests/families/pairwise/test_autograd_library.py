"""Gradients of compiled, traced and recorded pairwise calls on CPU tensors are the eager ones."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

import kernlib as kl
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.gradients import operators

M, N, K, L = 5, 4, 3, 2
EXPONENTIAL = kl.Pairwise(inner=stages.ExpPower())
CASES = {  # descriptor, numbers, tensors, whether b is left out
    "l1": (kl.l1_distance(), {}, {}, False),
    "gaussian": (kl.gaussian(), {}, {"bandwidth": 2.0}, False),
    "laplace": (kl.laplace_l1(), {"bandwidth": 2.0}, {}, False),
    "pq": (kl.laplace_pq(), {"q": 0.9}, {"p": 1.4, "bandwidth": 2.0}, False),
    "host p": (kl.laplace_pq(), {"p": 1.4, "q": 0.9}, {"bandwidth": 2.0}, False),
    "polynomial": (kl.polynomial(2), {"gamma": 0.5}, {"offset": 1.0}, False),
    "symmetric": (kl.gaussian(symmetric=True), {"regularization": 0.5}, {"bandwidth": 2.0}, True),
    "exponential": (EXPONENTIAL, {"p": 1.4}, {"inner_scale": -0.5}, False),
    "largest": (kl.p_distance(), {"p": float("inf")}, {}, False),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def points(*shape, grad=True, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def made(case, batch=()):
    """A function of tensors alone, and those."""
    descriptor, numbers, values, alone = CASES[case]
    sides = [points(*batch, M, K)] if alone else [points(*batch, M, K), points(N, K)]
    tensors = [torch.tensor(value, requires_grad=True) for value in values.values()]

    def function(*given):
        named = dict(zip(values, given[len(sides) :], strict=True))
        return kl.run_kernel(descriptor, *given[: len(sides)], **numbers, **named).sin()

    return function, [*sides, *tensors]


def gradients(function, tensors, along):
    return torch.autograd.grad(function(*tensors), tensors, along)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", CASES)
def test_row_36_a_compiled_gradient_is_the_eager_one(case, backend, seed):
    function, tensors = made(case)
    along = torch.randn(function(*tensors).shape)
    found = gradients(compiled(function, backend), tensors, along)
    for ours, theirs in zip(found, gradients(function, tensors, along), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_inductor_fuses_what_follows_the_sums(seed):
    function, tensors = made("gaussian")
    along = torch.randn(M, N)
    found = gradients(compiled(function, "inductor"), tensors, along)
    for ours, theirs in zip(found, gradients(function, tensors, along), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_half_types_and_batches(seed):
    for dtype in (torch.float16, torch.bfloat16):
        a, b = points(L, M, K, dtype=dtype), points(N, K, dtype=dtype)
        width = torch.tensor([1.0, 2.0], requires_grad=True)
        function = lambda a, b, w: kl.run_kernel(kl.laplace_l2(), a, b, bandwidth=w)  # noqa: E731
        along = torch.randn(L, M, N).to(dtype)
        found = gradients(compiled(function), (a, b, width), along)
        wanted = gradients(function, (a, b, width), along)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_sizes_and_numbers_may_be_dynamic(seed):
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, y, width):
        return kl.run_kernel(kl.laplace_l2(), x, y, bandwidth=width).square()

    run = compiled(function, counter, dynamic=True)
    width = torch.tensor(2.0, requires_grad=True)
    for m, n in ((4, 6), (8, 5), (3, 7)):
        tensors = points(m, K), points(n, K), width
        along = torch.randn(m, n)
        found, wanted = gradients(run, tensors, along), gradients(function, tensors, along)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1


def test_cdist_and_layers_around_it(seed):
    def function(x, y, weight):
        return (kl.cdist(x @ weight, y @ weight, p=1.5) + 1).log()

    tensors = points(L, M, K), points(N, K), points(K, K)
    along = torch.randn(L, M, N)
    found = gradients(compiled(function), tensors, along)
    for ours, theirs in zip(found, gradients(function, tensors, along), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_forward_pass_without_a_gradient_is_one_operator():
    graphs = []

    def keep(graph_module, inputs):
        graphs.append(graph_module)
        return graph_module

    a, b = points(M, K, grad=False), points(N, K, grad=False)
    compiled(lambda x, y: kl.run_kernel(kl.gaussian(), x, y, bandwidth=2.0), keep)(a, b)
    called = [n.target for n in graphs[0].graph.nodes if n.op == "call_function"]
    assert called == [torch.ops.kernlib.pairwise.default]


def test_make_fx_sees_forward_and_backward(seed):
    function, tensors = made("gaussian")
    along = torch.randn(M, N)

    def both(*given):
        return torch.autograd.grad(function(*given), given, along)

    graph = make_fx(both)(*tensors)
    names = {str(n.target) for n in graph.graph.nodes if n.op == "call_function"}
    assert {"kernlib.pairwise_sums.default", "kernlib.pairwise_gradient.default"} <= names
    fresh = [t.detach().clone().requires_grad_() for t in tensors]
    for ours, theirs in zip(graph(*fresh), both(*fresh), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_have_gradients(inside):
    with FakeTensorMode() as mode:
        x = torch.empty(L, M, K, requires_grad=True)
        y, width = torch.empty(N, K), torch.empty(L, requires_grad=True)
    with mode if inside else torch.enable_grad():
        k = kl.run_kernel(kl.laplace_l1(), x, y, bandwidth=width)
    with mode:
        found = torch.autograd.grad(k.sum(), (x, width))
    assert [g.shape for g in found] == [x.shape, width.shape]


def test_a_gradient_through_out_is_refused():
    def function(x, y, out):
        return kl.run_kernel(kl.l1_distance(), x, y, out=out)

    with pytest.raises(RuntimeError, match=r"a requires a gradient.* out"):
        compiled(function)(points(M, K), points(N, K), torch.empty(M, N))


def test_transforms_of_torch_func_are_refused():
    b = points(N, K, grad=False)
    with pytest.raises(RuntimeError, match=r"x1 is inside a transform of torch\.func"):
        torch.func.grad(lambda x: kl.cdist(x, b).sum())(points(M, K, grad=False))


def test_what_is_wrong_is_said_while_gradients_are_recorded():
    a, b = points(M, K), points(N, K)
    wrong = {
        "needs bandwidth": lambda: kl.run_kernel(kl.gaussian(), a, b),
        "b is missing": lambda: kl.run_kernel(kl.l1_distance(), a),
        "width is no argument": lambda: kl.run_kernel(kl.l1_distance(), a, b, width=2.0),
        "same number of feat": lambda: kl.run_kernel(kl.l1_distance(), a, b[:, 1:]),
    }
    for message, call in wrong.items():
        for run in (call, compiled(call)):
            with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
                run()


SUMS = {  # descriptor, numbers of p and scale, tensors of p and scale
    "squares": (kl.squared_distance(), None, None, None, None),
    "dot": (kl.dot_product(), None, None, None, None),
    "power": (kl.power_sum(), 1.5, None, None, None),
    "tensor p": (kl.power_sum(), None, None, [1.5, 2.5], None),
    "exponential": (EXPONENTIAL, 2.5, None, None, -0.5),
}


@pytest.mark.parametrize("case", SUMS)
def test_torchs_own_checks_of_operators_pass(case, seed):
    descriptor, *numbers, p, scale = SUMS[case]
    tensors = [None if v is None else torch.tensor(v, requires_grad=True) for v in (p, scale)]
    inner = (descriptor.text, *numbers, *tensors)
    batch = 2 if isinstance(p, list) else 1
    a, b, weights = points(batch, M, K), points(1, N, K), points(batch, M, N)
    opcheck(torch.ops.kernlib.pairwise_sums.default, (a, b, *inner))
    opcheck(torch.ops.kernlib.pairwise_gradient.default, (a, b, weights, True, *inner))


def test_recorded_calls_have_the_shapes_of_eager_ones():
    for shapes in [((M,), (N,)), ((1, M), (N,)), ((M,), (L, N)), ((L, M), (1, N))]:
        a, b = (points(*shape, K) for shape in shapes)
        for width in (2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.ones(L)):
            found = operators.recorded(kl.laplace_l1(), a, b, {"bandwidth": width}, 0)
            wanted = kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=width)
            torch.testing.assert_close(found, wanted)
