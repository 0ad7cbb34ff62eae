"""KroneckerLinear: values and gradients against its matrix, how it is drawn, the nearest product to
a dense layer, and life in place of nn.Linear."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from functools import reduce

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils import parametrize

import kernlib as kl
from kernlib.nn.kronecker_linear import KroneckerLinear, nearest_kronecker
from tests.support.defaults import default_dtype

SIZES = {
    "one": ((7,), (5,)),
    "two": ((3, 5), (4, 2)),
    "square": ((4, 4), (4, 4)),
    "three": ((3, 1, 5), (2, 7, 1)),
    "four": ((2, 3, 2, 3), (3, 2, 1, 2)),
    "to one": ((2, 3), (1, 1)),
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def random(*shape, dtype=torch.float64, seed=0, requires_grad=False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return values.requires_grad_(requires_grad)


def layer(sizes=SIZES["two"], dtype=torch.float64, seed=0, **options) -> KroneckerLinear:
    made = KroneckerLinear(*sizes, dtype=dtype, **options)
    with torch.no_grad():
        for place, parameter in enumerate(made.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + 7 * place))
    return made


def matrix(made: KroneckerLinear) -> torch.Tensor:
    """(in_features, out_features), in float64."""
    return reduce(torch.kron, [factor.double() for factor in made.factors])


def function_of(made: KroneckerLinear):
    """The layer as a function of its input and parameters."""
    names = [name for name, _ in made.named_parameters()]

    def compute(x, *values):
        return torch.func.functional_call(made, dict(zip(names, values, strict=True)), x)

    return compute


def dense(in_features, out_features, seed=0, **options) -> nn.Linear:
    made = nn.Linear(in_features, out_features, **({"dtype": torch.float64} | options))
    with torch.no_grad():
        for place, parameter in enumerate(made.parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed + 7 * place))
    return made


# Construction.


def test_names_and_order_of_arguments_are_those_of_linear():
    names = list(inspect.signature(KroneckerLinear).parameters)
    theirs = list(inspect.signature(nn.Linear).parameters)
    assert names == ["in_sizes", "out_sizes", *theirs[2:], "activation", "precision"]


def test_sizes_and_members():
    made = KroneckerLinear([3, 1, 5], (2, 7, 1), activation="gelu", precision="fp32")
    assert (made.in_sizes, made.out_sizes) == ((3, 1, 5), (2, 7, 1))
    assert (made.in_features, made.out_features) == (15, 14)
    assert [tuple(factor.shape) for factor in made.factors] == [(3, 2), (1, 7), (5, 1)]
    assert made.bias.shape == (14,) and made.precision == "fp32"
    assert made.activation == (kl.Gelu(),)
    assert [*made.state_dict()] == ["bias", "factors.0", "factors.1", "factors.2"]
    assert KroneckerLinear([3], [2], bias=False).bias is None
    assert KroneckerLinear(np.array([3, 2]).tolist(), torch.Size([2, 2])).in_features == 6
    assert KroneckerLinear([np.int64(3)], [2]).in_sizes == (3,)


def test_its_text_says_what_it_is():
    text = repr(KroneckerLinear([3, 5], [4, 2], bias=False, activation="relu", precision="tf32"))
    assert "in_features=15, out_features=8, in_sizes=(3, 5), out_sizes=(4, 2), bias=False" in text
    assert "activation=Relu(), precision='tf32'" in text
    assert "activation" not in repr(KroneckerLinear([3], [2]))


def test_dtype_and_device():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        made = KroneckerLinear([3, 5], [4, 2], True, "cpu", dtype)
        assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    with default_dtype(torch.float64):
        assert KroneckerLinear([3], [2]).bias.dtype == torch.float64


WRONG = {
    "int": (dict(in_sizes=15), TypeError, "in_sizes must be a list of ints, .* got 15"),
    "floats": (dict(in_sizes=[3.0, 5]), TypeError, r"in_sizes must be .*got \[3.0, 5\]"),
    "bool": (dict(in_sizes=[True, 5]), TypeError, "in_sizes must be a list of ints"),
    "empty": (dict(in_sizes=[]), ValueError, "in_sizes must hold at least one size"),
    "zero": (dict(out_sizes=[4, 0]), ValueError, "out_sizes must hold sizes of 1 or more"),
    "counts": (dict(in_sizes=[15]), ValueError, "one size a factor each, got 1 and 2"),
    "huge": (dict(in_sizes=[2**30, 2**30]), ValueError, r"in_sizes must multiply to below 2\*\*60"),
    "scale": (dict(activation=kl.Scale()), ValueError, r"needs the argument.* scale"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_an_exception_that_names_it(case):
    arguments, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        KroneckerLinear(**({"in_sizes": [3, 5], "out_sizes": [4, 2]} | arguments))


# Values.


@each_size
@pytest.mark.parametrize("bias", [False, True])
def test_values_for_any_leading_dimensions(sizes, bias):
    made = layer(sizes, bias=bias)
    for lead in [(), (1,), (7,), (0,), (2, 3), (2, 1, 3, 1)]:
        x = random(*lead, made.in_features, seed=3)
        expected = F.linear(x, matrix(made).T, made.bias)
        torch.testing.assert_close(made(x), expected)


def test_values_of_strided_inputs():
    made = layer()
    x = random(4, 15, 6).transpose(1, 2)[:, ::2]
    torch.testing.assert_close(made(x), made(x.contiguous()))
    torch.testing.assert_close(made(random(15).expand(3, 15))[1], made(random(15)))


ACTIVATIONS = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "leaky_relu": F.leaky_relu,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_follow_the_bias(name):
    made, x = layer(activation=name), random(7, 15)
    expected = ACTIVATIONS[name](F.linear(x, matrix(made).T, made.bias))
    torch.testing.assert_close(made(x), expected)
    several = layer(activation=(kl.Relu(), kl.Gelu("tanh")))
    plain = F.linear(x, matrix(several).T, several.bias)
    torch.testing.assert_close(several(x), F.gelu(F.relu(plain), approximate="tanh"))


@pytest.mark.parametrize(
    "dtype, gate", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)]
)
def test_accuracy(dtype, gate):
    made = layer(((12, 31), (7, 16)), dtype)
    x = random(33, 372, dtype=dtype)
    expected = F.linear(x.double(), matrix(made).T, made.bias.double())
    found = made(x)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < gate


@each_size
def test_gradients(sizes):
    made = layer(sizes)
    given = (random(2, made.in_features, requires_grad=True), *made.parameters())
    assert gradcheck(function_of(made), given)


@pytest.mark.slow
def test_gradients_of_gradients():
    made = layer(activation="tanh")
    given = (random(2, 15, requires_grad=True), *made.parameters())
    assert gradgradcheck(function_of(made), given)


def test_its_weight_is_that_of_linear():
    made = layer(SIZES["three"])
    assert made.weight.shape == (14, 15)
    torch.testing.assert_close(made.weight, matrix(made).T)
    made.weight.sum().backward()
    assert all(factor.grad is not None for factor in made.factors)


# How it is drawn.


@pytest.mark.parametrize("sizes", [(100,), (20, 30), (10, 12, 14), (6, 7, 8, 9)], ids=str)
def test_factors_are_uniform_in_bounds_whose_variances_multiply_to_that_of_linear(sizes):
    torch.manual_seed(1)
    made = KroneckerLinear(sizes, (40,) * len(sizes), bias=False, dtype=torch.float64)
    variance = 1.0
    for factor, size in zip(made.requires_grad_(False).factors, sizes, strict=True):
        bound = math.sqrt(3 ** (1 - 1 / len(sizes)) / size)
        assert 0.95 * bound < factor.abs().max() <= bound
        assert abs(float(factor.mean())) < 0.15 * bound
        assert abs(float(factor.var()) / (bound**2 / 3) - 1) < 0.2
        variance *= bound**2 / 3
    assert math.isclose(variance, 1 / (3 * made.in_features))


def test_parameters_are_drawn_anew():
    torch.manual_seed(0)
    made = KroneckerLinear([30, 30], [4, 50])
    assert 0.9 / 30 < made.bias.abs().max() <= 1 / 30
    before = [parameter.clone() for parameter in made.parameters()]
    made.reset_parameters()
    assert not any(map(torch.equal, made.parameters(), before))


# From a dense layer, and back.


@each_size
def test_a_product_is_found_again(sizes):
    target = layer(sizes, activation="gelu")
    linear = target.to_linear()
    made = KroneckerLinear.from_linear(linear, *sizes, activation="gelu")
    torch.testing.assert_close(made.weight, target.weight)
    assert torch.equal(made.bias, target.bias)
    x = random(7, made.in_features)
    torch.testing.assert_close(made(x), target(x))
    norms = torch.stack([factor.norm() for factor in made.factors])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))


@pytest.mark.parametrize("sizes", [SIZES["two"], SIZES["square"], ((2, 9), (8, 1))], ids=str)
def test_of_two_factors_it_is_the_nearest(sizes):
    """Whose error is what the other singular values of the rearranged matrix hold."""
    (p1, p2), (q1, q2) = sizes
    linear = dense(p1 * p2, q1 * q2)
    made = KroneckerLinear.from_linear(linear, *sizes)
    blocks = [
        linear.weight.T[i * p2 : (i + 1) * p2, j * q2 : (j + 1) * q2].flatten()
        for i in range(p1)
        for j in range(q1)
    ]
    values = torch.linalg.svdvals(torch.stack(blocks))
    error = (made.weight - linear.weight).norm()
    torch.testing.assert_close(error, values[1:].norm())


@pytest.mark.parametrize("sizes", [SIZES["three"], SIZES["four"], ((2, 3, 4), (4, 2, 3))], ids=str)
def test_of_more_factors_none_alone_can_be_better(sizes):
    """Each is the least-squares solution for the others, and no start of chance is far better."""
    linear = dense(math.prod(sizes[0]), math.prod(sizes[1]))
    factors = KroneckerLinear.from_linear(linear, *sizes).factors
    target = linear.weight.T.detach()
    error = (reduce(torch.kron, factors) - target).square().sum()
    for factor in factors:
        slope = torch.autograd.grad(error, factor, retain_graph=True)[0]
        assert slope.norm() < 1e-4 * target.norm()
    nested = nearest_of_two_and_two(target, sizes)
    assert error <= (reduce(torch.kron, nested) - target).square().sum() + 1e-9


def nearest_of_two_and_two(target, sizes):
    """One factor after the other, each the nearest to what remains, without improvement."""
    (rows, columns), made = sizes, []
    while len(rows) > 1:
        rest = (rows[0], math.prod(rows[1:])), (columns[0], math.prod(columns[1:]))
        first, target = nearest_kronecker(target, *rest)
        made.append(first)
        rows, columns = rows[1:], columns[1:]
    return [*made, target]


def test_a_layer_of_zeros_can_still_train():
    linear = dense(12, 12)
    with torch.no_grad():
        linear.weight.zero_()
    for sizes in [((12,), (12,)), ((3, 4), (4, 3)), ((3, 2, 2), (2, 3, 2))]:
        made = KroneckerLinear.from_linear(linear, *sizes)
        assert not made.weight.any() and all(factor.isfinite().all() for factor in made.factors)
        made(random(5, 12)).sum().backward()
        assert any(factor.grad.any() for factor in made.factors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_from_linear_keeps_dtype_mode_and_what_trains(dtype):
    linear = dense(15, 8, dtype=dtype).eval()
    linear.bias.requires_grad_(False)
    made = KroneckerLinear.from_linear(linear, *SIZES["two"])
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}
    assert not made.training and made.factors[0].requires_grad and not made.bias.requires_grad
    linear.weight.requires_grad_(False)
    frozen = KroneckerLinear.from_linear(linear, *SIZES["two"], precision="fp32")
    assert not frozen.factors[1].requires_grad and frozen.precision == "fp32"
    assert KroneckerLinear.from_linear(dense(15, 8, bias=False), *SIZES["two"]).bias is None


def with_weight(value):
    linear = dense(15, 8)
    with torch.no_grad():
        linear.weight[0, 0] = value
    return linear


WRONG_DENSE = {
    "matrix": (lambda: random(8, 15), TypeError, "linear must be an nn.Linear, got .*Tensor"),
    "features": (lambda: dense(15, 9), ValueError, r"has shape \(9, 15\).* make one of \(8, 15\)"),
    "lazy": (lambda: nn.LazyLinear(8), ValueError, "linear is a lazy layer"),
    "nan": (lambda: with_weight(math.nan), ValueError, "must be finite"),
    "inf": (lambda: with_weight(math.inf), ValueError, "must be finite"),
    "complex": (lambda: nn.Linear(15, 8, dtype=torch.complex64), TypeError, "got torch.complex64"),
}


@pytest.mark.parametrize("case", WRONG_DENSE)
def test_what_is_no_dense_layer_is_said(case):
    make, kind, message = WRONG_DENSE[case]
    with pytest.raises(kind, match=message):
        KroneckerLinear.from_linear(make(), *SIZES["two"])


@each_size
@pytest.mark.parametrize("bias", [False, True])
def test_to_linear_is_a_linear_of_its_own(sizes, bias):
    made = layer(sizes, bias=bias).eval()
    linear = made.to_linear()
    assert torch.equal(made.to_dense(), made.weight) and made.to_dense().requires_grad
    assert type(linear) is nn.Linear and not linear.training
    assert all(parameter.requires_grad for parameter in linear.parameters())
    x = random(6, made.in_features)
    torch.testing.assert_close(linear(x), made(x))
    before = made(x)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(made(x), before)


# Life in place of nn.Linear.


def test_copies_and_pickles():
    made = layer(activation=(kl.Relu(), kl.Gelu("tanh")), precision="fp32")
    x = random(6, 15)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(same(x), made(x)) and repr(same) == repr(made)
        with torch.no_grad():
            same.factors[0].zero_()
        assert made.factors[0].all()


def test_it_is_cast_and_moved():
    made, x = layer(), random(6, 15)
    narrow = copy.deepcopy(made).to(torch.float32)
    torch.testing.assert_close(narrow(x.float()).double(), made(x), rtol=1e-4, atol=1e-4)
    assert copy.deepcopy(made).half()(x.half()).dtype == torch.float16
    gone = copy.deepcopy(made).to("meta")
    assert gone(x.to("meta")).shape == (6, 8) and gone.to_linear().weight.is_meta


def test_a_layer_on_meta_is_filled_later():
    made = KroneckerLinear([3, 5], [4, 2], device="meta", dtype=torch.float64, activation="relu")
    assert made(torch.empty(2, 3, 15, device="meta", dtype=torch.float64)).shape == (2, 3, 8)
    with torch.device("meta"):
        assert KroneckerLinear([3, 5], [4, 2]).factors[0].is_meta
    filled = made.to_empty(device="cpu")
    source = layer(activation="relu")
    filled.load_state_dict(source.state_dict())
    x = random(6, 15)
    assert torch.equal(filled(x), source(x))
    assigned = KroneckerLinear([3, 5], [4, 2], device="meta", activation="relu")
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(assigned(x), source(x))


def test_autocast():
    made, x = layer(dtype=torch.float32), random(6, 15, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = made(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), made(x), rtol=0.05, atol=0.1)
    found.sum().backward()
    assert made.factors[0].grad.dtype == torch.float32


def test_inputs_of_inference_mode_train_it():
    made, x = layer(), random(6, 15)
    with torch.inference_mode():
        features = x.clone()
        plain = made(features)
    found = made(features)
    assert torch.equal(found, plain)
    found.sum().backward()
    torch.testing.assert_close(made.bias.grad, torch.full_like(made.bias, 6.0))


def test_parametrized_factors_and_bias():
    class Double(nn.Module):
        def forward(self, value):
            return 2 * value

    made, x = layer(), random(6, 15)
    plain = F.linear(x, matrix(made).T)
    parametrize.register_parametrization(made.factors, "0", Double())
    parametrize.register_parametrization(made, "bias", Double())
    torch.testing.assert_close(made(x), 2 * plain + made.bias)
    torch.testing.assert_close(made(x), made.to_linear()(x))


def test_vmap_over_layers():
    layers = [layer(seed=seed) for seed in (1, 2, 3)]
    values, _ = torch.func.stack_module_state(layers)
    x = random(6, 15)
    base = layer()
    found = torch.vmap(lambda v: torch.func.functional_call(base, v, x))(values)
    torch.testing.assert_close(found, torch.stack([one(x) for one in layers]))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_torch_compile_without_a_break(bias):
    made = layer(bias=bias, activation="gelu")
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    plain = copy.deepcopy(made)
    for rows in (6, 7, 9):
        x = random(rows, 15)
        torch.testing.assert_close(compiled(x), plain(x))
    compiled(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(made.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.slow
def test_torch_export():
    made, x = layer(activation="gelu"), random(6, 15)
    program = torch.export.export(made, (x,))
    torch.testing.assert_close(program.module()(x), made(x))
