"""Gradients on the GPU against float64, and the layer that trains with them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse import reference
from kernlib.nn import KSLinear
from tests.gpu.families.kronecker_sparse import cases as ks

PATTERNS = (*ks.FEW, (2, 72, 100, 2))
ALGOS = ("kernel", "einsum", "bmm", "dense", "sparse", "bsr")
BIAS = (kl.Bias(),)
every_kernel = pytest.mark.parametrize("kernels", ks.KERNELS)


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels of most tests here, compiled side by side."""
    specs = []
    for names in ks.KERNELS.values():
        with ks.only(*names):
            for pattern in (*PATTERNS, *ks.CHAIN):
                for numbers in ks.NUMBERS:
                    for last in ks.LAYOUTS:
                        descriptor = ks.product(pattern, numbers, last, BIAS)
                        for batch in (1, 129, 136, 5000):
                            specs += ks.specs_of_step(descriptor, batch, numbers)
    ks.build(specs)


def recorded(pattern, batch, numbers: str, batch_last: bool, epilogue=BIAS) -> tuple:
    """A descriptor; x, weight and parameters that ask for their gradients; one of the result."""
    descriptor = ks.product(pattern, numbers, batch_last, epilogue)
    x, weight = ks.operands(pattern, batch, numbers, batch_last)
    values = {}
    for name in descriptor.parameters:
        shape = (descriptor.out_features,) if name in descriptor.vectors else ()
        values[name] = ks.random(*shape, dtype=x.dtype if shape else torch.float32)
    for tensor in (x, weight, *values.values()):
        tensor.requires_grad_()
    grad = torch.randn_like(ks.exact(x, weight, batch_last)).to(x.dtype)
    return descriptor, x, weight, values, grad


def in_float64(descriptor, x, weight, values: dict, function) -> tuple:
    """Leaves of a graph in float64, and the result: ``function`` of the product and the values. Of
    a scalar there is a leaf for each element of the product, whose gradients it sums."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    plain = kl.KroneckerSparse(*descriptor.pattern, batch_last=descriptor.batch_last)
    y, given = reference.kronecker_sparse(plain, *leaves), {}
    for name, value in values.items():
        value = value.detach().double()
        value = value if value.dim() else value.expand(y.shape).clone()
        leaves.append(value.requires_grad_())
        ends = (1,) * (y.dim() - 1) if descriptor.batch_last else ()
        given[name] = value.view(-1, *ends) if name in descriptor.vectors else value
    return leaves, function(y, **given)


def compare(found, wanted, tolerance: float, names) -> None:
    for ours, theirs, name in zip(found, wanted, names, strict=True):
        if ours.dim() == 0 < theirs.dim():
            error = ((ours.double() - theirs.sum()).abs() / theirs.norm()).item()
        else:
            assert ours.shape == theirs.shape, name
            error = ks.relative_error(ours, theirs)
        assert error <= tolerance, f"{name}: error {error:.2e} > {tolerance:.0e}"


@every_kernel
@ks.both_layouts
@ks.all_numbers
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_gradients_of_all_operands(pattern, numbers, batch_last, kernels, seed):
    for batch in (136, (3, 43), (), 5000):
        descriptor, x, weight, values, grad = recorded(pattern, batch, numbers, batch_last)
        with ks.only(*ks.KERNELS[kernels]):
            y = kl.run_kernel(descriptor, x, weight, **values)
            found = torch.autograd.grad(y, (x, weight, values["bias"]), grad)
        leaves, exact = in_float64(descriptor, x, weight, values, lambda y, bias: y + bias)
        wanted = torch.autograd.grad(exact, leaves, grad.double())
        assert ks.relative_error(y, exact.detach()) <= ks.TOLERANCE[numbers]
        compare(found, wanted, ks.TOLERANCE[numbers], ("x", "weight", "bias"))


EPILOGUES = {
    "bias, gelu": ((kl.Bias(), kl.Gelu()), lambda v, bias: F.gelu(v + bias)),
    "silu, bias": ((kl.Silu(), kl.Bias()), lambda v, bias: F.silu(v) + bias),
    "all": (
        (kl.Scale(), kl.Bias(), kl.Gelu("tanh"), kl.Bias("late"), kl.Scale("gain")),
        lambda v, scale, bias, late, gain: (
            gain * (F.gelu(v * scale + bias, approximate="tanh") + late)
        ),
    ),
}


@ks.both_layouts
@pytest.mark.parametrize("numbers", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("name", EPILOGUES)
def test_gradients_through_epilogues(name, numbers, batch_last, seed):
    """Also of scalars on the device. In half types the value is rounded before an activation."""
    epilogue, function = EPILOGUES[name]
    for pattern in ks.FEW:
        given = recorded(pattern, (4, 50), numbers, batch_last, epilogue)
        descriptor, x, weight, values, grad = given
        leaves, exact = in_float64(descriptor, x, weight, values, function)
        wanted = torch.autograd.grad(exact, leaves, grad.double())
        y = kl.run_kernel(descriptor, x, weight, **values)
        found = torch.autograd.grad(y, (x, weight, *values.values()), grad)
        compare(found, wanted, 2 * ks.TOLERANCE[numbers], ("x", "weight", *values))


@every_kernel
@ks.both_layouts
@ks.all_numbers
@ks.few_patterns
def test_gradients_of_gradients(pattern, numbers, batch_last, kernels, seed):
    descriptor, x, weight, values, grad = recorded(pattern, 200, numbers, batch_last)
    grad.requires_grad_()
    factors = [torch.randn_like(t) for t in (x, weight)]

    def twice(y, inputs, grad, factors):
        first = torch.autograd.grad(y, inputs[:2], grad, create_graph=True)
        return torch.autograd.grad(first, (*inputs[:2], grad), factors)

    with ks.only(*ks.KERNELS[kernels]):
        found = twice(kl.run_kernel(descriptor, x, weight, **values), (x, weight), grad, factors)
    leaves, exact = in_float64(descriptor, x, weight, values, lambda y, bias: y + bias)
    other = grad.detach().double().requires_grad_()
    wanted = twice(exact, leaves, other, [t.double() for t in factors])
    compare(found, wanted, 2 * ks.TOLERANCE[numbers], ("x", "weight", "gradient"))


@ks.both_layouts
@ks.few_patterns
def test_gradients_of_every_layout(pattern, batch_last, seed):
    """Expanded, transposed and strided ones, as sums, views and slices of a result give them."""
    descriptor, x, weight, _, grad = recorded(pattern, 136, "fp32", batch_last, ())
    x, weight = x.detach(), weight.detach()
    losses = {
        "sum": lambda y: y.sum(),
        "transposed": lambda y: (y.mT * grad.mT.contiguous()).sum(),
        "slice": lambda y: (y[::2, 1:] * grad[::2, 1:]).sum(),
        "expanded": lambda y: (y[:1].expand_as(y) * grad).sum(),
    }
    for name, loss in losses.items():
        for layout in ("itself", "one element further", "every third row", "transposed slice"):
            given = [t.detach().requires_grad_() for t in (ks.views(x)[layout], weight)]
            found = torch.autograd.grad(loss(kl.run_kernel(descriptor, *given)), given)
            leaves = [t.detach().double().requires_grad_() for t in given]
            exact = reference.kronecker_sparse(descriptor, *leaves)
            wanted = torch.autograd.grad(loss(exact), leaves)
            compare(found, wanted, 2e-6, [f"{name}, {layout}: {each}" for each in ("x", "weight")])


@ks.both_layouts
def test_only_what_is_asked_for_is_computed(batch_last, seed):
    descriptor, x, weight, values, grad = recorded(ks.LANES, 136, "fp16", batch_last)
    operands = {"x": x, "weight": weight, **values}
    launches = {}
    for wanted in operands:
        given = {name: t.detach() for name, t in operands.items()}
        given[wanted].requires_grad_()
        y = kl.run_kernel(descriptor, given.pop("x"), given.pop("weight"), **given)
        with ks.choosing(None) as seen:
            y.backward(grad)
        launches[wanted] = len(seen.planned)
    assert launches == {"x": 1, "weight": 1, "bias": 0}


@ks.both_layouts
def test_nothing_is_recorded_under_no_grad_and_all_is_fused(batch_last, seed):
    epilogue = (kl.Bias(), kl.Gelu())
    descriptor, x, weight, values, _ = recorded(ks.LANES, 136, "fp16", batch_last, epilogue)
    for context, fused in ((torch.no_grad(), True), (torch.enable_grad(), False)):
        with context, ks.choosing(None) as seen:
            y = kl.run_kernel(descriptor, x, weight, **values)
        assert y.requires_grad is not fused
        assert ("Gelu" in seen.launched[-1]) is fused


# The layer.


def layer(patterns=ks.CHAIN, numbers="fp32", **options) -> KSLinear:
    return KSLinear(patterns, dtype=ks.DTYPES[numbers], device=ks.DEVICE, **options)


@ks.both_layouts
@pytest.mark.parametrize("numbers", ("fp32", "fp16", "bf16"))
@pytest.mark.parametrize("patterns", (ks.CHAIN, ((2, 3, 5, 4),), ((3, 7, 8, 2),)), ids=str)
def test_all_algorithms_agree(patterns, numbers, batch_last, seed):
    """Values and gradients, each against float64."""
    made = layer(patterns, numbers, bs_last=batch_last)
    shape = ks.shape_of(made.in_features, (4, 24), batch_last)
    x = ks.random(*shape, dtype=ks.DTYPES[numbers])
    grad = ks.random(*ks.shape_of(made.out_features, (4, 24), batch_last), dtype=x.dtype)

    def run(layer, x, grad):
        x = x.detach().requires_grad_()
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad)

    double = copy.deepcopy(made).double()
    double.algo = "einsum"
    wanted = run(double, x.double(), grad.double())
    names = ("y", "x", *(name for name, _ in made.named_parameters()))
    for algo in ALGOS:
        made.algo = algo
        compare(
            run(made, x, grad), wanted, 2 * ks.TOLERANCE[numbers], [f"{algo} {n}" for n in names]
        )
        with torch.no_grad():
            compare([made(x)], wanted[:1], 2 * ks.TOLERANCE[numbers], [f"{algo} without grad"])


@ks.both_layouts
@pytest.mark.parametrize("algo", ("auto", *ALGOS))
@pytest.mark.parametrize("numbers", ("fp16", "bf16"))
def test_autocast_is_that_of_a_linear_layer(numbers, algo, batch_last, seed):
    made = layer(bs_last=batch_last, algo=algo)
    linear = torch.nn.Linear(made.in_features, made.out_features, device=ks.DEVICE)
    with torch.no_grad():
        linear.weight.copy_(made.to_dense())
        linear.bias.copy_(made.bias)
    x = ks.random(*ks.shape_of(made.in_features, (40,), batch_last)).requires_grad_()
    other = (x.mT if batch_last else x).detach().requires_grad_()
    with torch.autocast(ks.DEVICE, dtype=ks.DTYPES[numbers]):
        y, z = made(x), linear(other)
    assert y.dtype == z.dtype == ks.DTYPES[numbers]
    y.float().square().sum().backward()
    z.float().square().sum().backward()
    assert x.grad.dtype == made.bias.grad.dtype == made.factors[0].grad.dtype == torch.float32
    turned = (lambda t: t.mT) if batch_last else (lambda t: t)
    found = (turned(y), turned(x.grad), made.bias.grad)
    wanted = (z.detach().double(), other.grad.double(), linear.bias.grad.double())
    compare(found, wanted, 4 * ks.TOLERANCE[numbers], ("y", "x", "bias"))


def test_autocast_leaves_float64_alone_and_reaches_the_op(seed):
    x, weight = ks.operands(ks.LANES, 136)
    with torch.autocast(ks.DEVICE, dtype=torch.bfloat16), ks.choosing(None) as seen:
        found = kl.run_kernel(ks.product(ks.LANES), x, weight)
        double = kl.run_kernel(kl.KroneckerSparse(*ks.LANES), x.double(), weight.double())
    assert found.dtype == torch.bfloat16 and double.dtype == torch.float64
    assert all("bfloat16" in name for name in seen.launched)
    wanted = ks.exact(x.bfloat16(), weight.bfloat16())
    assert ks.relative_error(found, wanted) <= ks.TOLERANCE["bf16"]
    assert ks.relative_error(double, ks.exact(x, weight)) <= 1e-13
    assert primitives.weight_gradient(double, x.double(), ks.LANES).dtype == torch.float64


FLAT = [(1, 1536, 384, 1), (1, 2, 1, 1), (1, 48, 48, 2), (6, 64, 256, 1), (1, 4, 4, 3)]


@pytest.mark.parametrize("bs_last", ks.LAYOUTS)
@pytest.mark.parametrize("pattern", FLAT, ids=str)
@pytest.mark.parametrize("algo", ALGOS)
def test_patterns_whose_columns_repeat(algo, pattern, bs_last):
    layer = KSLinear([pattern], bias=False, algo=algo, bs_last=bs_last, device=ks.DEVICE)
    x, _ = ks.operands(pattern, 5, "fp32", bs_last)
    wanted = ks.exact(x, layer.factors[0].detach(), bs_last)
    for recorded in (True, False, False):  # the last from what was kept
        with torch.set_grad_enabled(recorded):
            torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.few(12)
@pytest.mark.parametrize("promised", (False, True))
@pytest.mark.parametrize("algo", ALGOS)
def test_replayed_steps_between_two_frozen_calls_show(algo, promised):
    """Torch counts no write of theirs; under the promise the gradients tell of them."""
    made = layer(((2, 4, 3, 2), (1, 5, 8, 2)), algo=algo)
    x = ks.random(7, made.in_features)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1, fused=True, capturable=True)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        optimizer.step()
    made.requires_grad_(False)
    made = made.freeze() if promised else made
    with torch.no_grad():
        before = made(x)
        for _ in range(2):
            graph.replay()
            wanted = F.linear(x.double(), made.to_dense().double(), made.bias.double())
            torch.testing.assert_close(made(x).double(), wanted, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(made(x), before, atol=1e-2)


@pytest.mark.parametrize("algo", ALGOS)
def test_a_promise_keeps_values_until_the_next_write(algo):
    made = layer(((2, 4, 3, 2), (1, 5, 8, 2)), algo=algo).requires_grad_(False).freeze()
    x = ks.random(7, made.in_features)
    with torch.no_grad():
        for write in (None, None, "counted", "promised anew"):
            if write == "counted":
                made.factors[0].mul_(2)
            if write == "promised anew":
                made.factors[1].data.mul_(2)
                made.freeze()
            wanted = F.linear(x.double(), made.to_dense().double(), made.bias.double())
            torch.testing.assert_close(made(x).double(), wanted, rtol=1e-4, atol=1e-4)
