"""What a descriptor says of its call, and what is said of one that is written wrongly."""

import inspect
import pickle
import re

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.base import Descriptor

FACTOR = kl.KroneckerSparse(6, 4, 4, 1, epilogue=(kl.Bias(), kl.Gelu()))
SIGNATURES = {  # by what is required
    "run_kernel(descriptor, a, b)": kl.l1_distance(),
    "run_kernel(descriptor, a)": kl.l1_distance(symmetric=True),
    "run_kernel(descriptor, a, b, bandwidth=...)": kl.gaussian(),
    "run_kernel(descriptor, a, b, p=...)": kl.p_distance(),
    "run_kernel(descriptor, a, b, p=..., bandwidth=..., q=...)": kl.laplace_pq(),
    "run_kernel(descriptor, a, b, p=..., inner_scale=...)": kl.exp_power_sum(),
    "run_kernel(descriptor, a, b, outer_p=...)": kl.Pairwise(outer=kl.Power()),
    "run_kernel(descriptor, x, weight, bias=...)": FACTOR,
    "run_kernel(descriptor, x, weight1, weight2)": kl.KroneckerSparseChain(
        (kl.KroneckerSparse(6, 4, 4, 1), kl.KroneckerSparse(1, 8, 24, 1))
    ),
    "run_kernel(descriptor, x, factor1, factor2)": kl.KroneckerProduct((2, 3)),
    "run_kernel(descriptor, w, x, scale=...)": kl.SparseMatmul(kl.Scale()),
    "run_kernel(descriptor, layout, a, b, beta=..., y=...)": kl.BlockSparseMatmul(
        "dsd", epilogue=kl.Add()
    ),
    "run_kernel(descriptor, layout, a, b, scale_a, scale_b)": kl.BlockSparseScaledMatmul("dsd"),
    "run_kernel(descriptor, layout, x, rpe=...)": kl.BlockSparseSoftmax(rpe=True),
    "run_kernel(descriptor, layout, q, k, v, window=..., slope=...)": kl.BlockSparseAttention(
        score="v - slope * (row - col)", captured={"slope": "head"}, causal=True, window=True
    ),
}
NAMES = {name: getattr(kl, name) for name in dir(kl)}


@pytest.mark.parametrize("call", SIGNATURES)
def test_a_descriptor_shows_what_its_call_takes(call):
    descriptor = SIGNATURES[call]
    assert descriptor.call == call and repr(descriptor).endswith(f"  # {call}")
    assert eval(repr(descriptor), dict(NAMES)) == descriptor
    required = re.findall(r"(\w+)=\.\.\.", call)
    named = descriptor.signature.partition("*, ")[2].rstrip(")").split(", ")
    assert [name for name in named if "=" not in name] == required
    assert {"out=None", "debug=False"} <= {*named}


def test_what_a_signature_names_is_taken():
    """Of the numbers by name alone: their defaults change nothing."""
    x = torch.randn(5, 3)
    plain = kl.run_kernel(kl.gaussian(), x, x, bandwidth=2.0)
    assert torch.equal(plain, kl.run_kernel(kl.gaussian(), x, x, bandwidth=2.0,
                                            **kl.gaussian().options))  # fmt: skip
    x, weight, bias = torch.randn(2, 24), torch.randn(6, 4, 4, 1), torch.randn(24)
    plain = kl.run_kernel(FACTOR, x, weight, bias=bias)
    assert torch.equal(plain, kl.run_kernel(FACTOR, x, weight, bias=bias, **FACTOR.options))


FUNCTIONS = [
    name for name, made in NAMES.items()
    if inspect.isfunction(made) and made.__module__ == "kernlib.families.pairwise.descriptor"
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_of_a_named_descriptor_has_fields_and_a_call(name):
    make = NAMES[name]
    parameters = inspect.signature(make).parameters
    assert {"precision", "symmetric", "direct"} <= {*parameters}
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    text = " ".join(inspect.getdoc(make).split())
    (call,) = re.findall(rf"``kernlib\.run_kernel\(kernlib\.{name}\(\), a, b(.*?)\)``", text)
    assert set(re.findall(r"(\w+)=", call)) == set(make().required)
    a = torch.rand(4, 3)
    values = {key: float(value) for key, value in re.findall(r"(\w+)=([-.\d]+)", call)}
    assert kl.run_kernel(make(), a, a[:2], **values).shape == (4, 2)


def test_help_of_run_kernel_has_each_class_and_its_arguments():
    text = inspect.getdoc(kl.run_kernel)
    kinds = [v for v in NAMES.values() if inspect.isclass(v) and issubclass(v, Descriptor)]
    assert len(kinds) == 10
    for kind in kinds:
        assert f":class:`kernlib.{kind.__name__}`" in text
    for descriptor in SIGNATURES.values():
        for name in descriptor.options:
            assert re.search(rf"\b{name}=", text), name


# Wrong fields, of which an argument of the call is the usual one.

FIELDS = {
    "named": (
        lambda: kl.gaussian(bandwidth=1.0),
        r"^gaussian\(\) got an unexpected keyword argument 'bandwidth': it is an argument of the "
        r"call, run_kernel\(gaussian\(\), a, b, bandwidth=1.0\)$",
    ),
    "two needed": (
        lambda: kl.polynomial(2, gamma=1.0),
        r"the call, run_kernel\(polynomial\(\), a, b, gamma=1.0, offset=1.0\)$",
    ),
    "exponent": (lambda: kl.p_distance(p=2), r"run_kernel\(p_distance\(\), a, b, p=1.5\)$"),
    "option": (lambda: kl.l1_distance(out=None), r"run_kernel\(l1_distance\(\), a, b, out=out\)$"),
    "positional": (
        lambda: kl.gaussian(2.0),
        r"unexpected positional argument, 2.0: numbers .* run_kernel\(gaussian\(\), a, b, band",
    ),
    "positional alone": (lambda: kl.dot_product(2.0), "unexpected positional argument, 2.0$"),
    "class": (
        lambda: kl.Pairwise(bandwidth=2.0),
        r"^Pairwise\(\) got an unexpected keyword argument 'bandwidth': it is an argument of a "
        r"call, as in run_kernel\(descriptor, a, b, bandwidth=1.0\), of descriptors whose stages",
    ),
    "class with the epilogue": (
        lambda: kl.Pairwise(epilogue=kl.Scale(), scale=2.0),
        r"it is an argument of the call, run_kernel\(descriptor, a, b, scale=1.0\)$",
    ),
    "factor": (
        lambda: kl.KroneckerSparse(6, 4, 4, 1, bias=torch.ones(24)),
        r"argument 'bias': it is an argument of a call, as in run_kernel\(descriptor, x, weight, b",
    ),
    "misspelt": (lambda: kl.gaussian(symetric=True), "'symetric'; did you mean symmetric?"),
    "misspelt of a class": (
        lambda: kl.KroneckerSparse(6, 4, 4, 1, batchlast=True),
        "'batchlast'; did you mean batch_last?",
    ),
    "replaced": (
        lambda: kl.gaussian().replace(bandwidth=2.0),
        r"it is an argument of the call, run_kernel\(descriptor, a, b, bandwidth=1.0\)$",
    ),
    "an epilogue beside its own": (
        lambda: kl.gaussian(epilogue=kl.Scale()),
        r"'epilogue': gaussian has an epilogue of its own, kernlib.Gaussian\(\)\. "
        r"kernlib.squared_distance\(epilogue=\.\.\.\) takes another in its place, and "
        r"kernlib.squared_distance\(epilogue=\(kernlib.Gaussian\(\), \.\.\.\)\) more behind it$",
    ),
    "an epilogue of a dot product": (
        lambda: kl.polynomial(epilogue=kl.Tanh()),
        r"\(degree=3\)\. kernlib.dot_product\(epilogue=\.\.\.\) takes another",
    ),
    "like nothing": (
        lambda: kl.gaussian(zzz=1),
        "'zzz'; it takes precision, symmetric, direct, categories, features$",
    ),
    "wrong in two ways": (lambda: kl.Pairwise("sum", zzz=1), "'zzz'; it takes operator, inner"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_wrong_field_is_told_where_it_goes(case):
    make, message = FIELDS[case]
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_written_in_place_of_a_second_epilogue_computes_both(name):
    """Of each descriptor that has one of its own."""
    own = NAMES[name]().epilogue
    if not own:
        return
    with pytest.raises(TypeError, match="of its own") as caught:
        NAMES[name](epilogue=kl.Scale())
    (advised,) = re.findall(r"kernlib\.(\w+)\(epilogue=\(", str(caught.value))
    assert getattr(kl, advised)(epilogue=own) == NAMES[name]()
    assert getattr(kl, advised)(epilogue=(*own, kl.Scale())).parameters[-1] == "scale"


# Descriptors that are called like functions.


@pytest.mark.parametrize("call", SIGNATURES)
def test_a_descriptor_that_is_called_says_how_it_is(call):
    descriptor = SIGNATURES[call]
    before = repr(descriptor), hash(descriptor), pickle.dumps(descriptor)
    with pytest.raises(TypeError, match="is a descriptor and no function: write ") as caught:
        descriptor(torch.ones(2, 3), torch.ones(4, 3), bandwidth=1.0)
    assert str(caught.value).endswith(f" write kernlib.{descriptor.call}")
    assert (repr(descriptor), hash(descriptor), pickle.dumps(descriptor)) == before
    assert pickle.loads(before[2]) == descriptor


# What is no descriptor, and what is no part of one.

X = torch.ones(300, 8)
CALLS = {
    "function": (kl.gaussian, r"got the function gaussian: call it, kernlib.gaussian\(\)$"),
    "class": (kl.KroneckerSparse, r"call it, kernlib.KroneckerSparse\(\.\.\.\)$"),
    "name": ("gaussian", r"got 'gaussian': write kernlib.gaussian\(\)$"),
    "other name": ("rbf", r"got 'rbf': write kernlib.gaussian\(\)$"),
    "no name": ("zzz", "got 'zzz'$"),
    "tensor": (X, r"got a Tensor of shape \(300, 8\): the descriptor comes first"),
    "epilogue": (kl.Relu(), r"got Relu\(\): an epilogue is .* kernlib.Pairwise\(epilogue=Relu"),
    "number": (3, "got 3$"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_what_is_no_descriptor_is_told_what_to_write(case):
    given, message = CALLS[case]
    for call in (
        lambda: kl.run_kernel(given, X, X),
        lambda: kl.prepare(given, X, X),
        lambda: kl.kernel_sum(given, X, X),
        lambda: kl.linalg.solve_kernel(given, X, X, regularization=1.0),
    ):
        with pytest.raises(TypeError, match="descriptor must be a.* such as .*" + message):
            call()


EPILOGUES = {
    "'relu'": ("relu", r"got 'relu': write kernlib.Relu\(\)$"),
    "'swish'": ("swish", r"write kernlib.Silu\(\)$"),
    "class": (kl.Relu, r"got the class Relu: call it, kernlib.Relu\(\)$"),
    "class with arguments": (kl.Custom, r"call it, kernlib.Custom\(\.\.\.\)$"),
    "module": (torch.nn.ReLU(), r"got ReLU\(\): write kernlib.Relu\(\)$"),
    "module's settings": (
        torch.nn.GELU("tanh"),
        r"write kernlib.Gelu\(approximate='tanh'\)$",
    ),
    "slope": (torch.nn.LeakyReLU(0.2), r"write kernlib.LeakyRelu\(negative_slope=0.2\)$"),
    "class of torch": (torch.nn.SiLU, r"got the class SiLU: write kernlib.Silu\(\)$"),
    "function": (torch.nn.functional.gelu, r"got the function gelu: write kernlib.Gelu\(\)$"),
    "expression": ("v * 2", r"an expression of v is kernlib.Custom\('v \* 2'\)$"),
    "descriptor": (kl.gaussian(), r"that is a whole descriptor, whose epilogue is Gaussian\(\)$"),
    "tensor": (X, r"got a Tensor of shape \(300, 8\)$"),
    "number": (3, "got 3$"),
}


@pytest.mark.parametrize("case", EPILOGUES)
def test_what_is_no_epilogue_is_told_what_to_write(case):
    given, message = EPILOGUES[case]
    for make in (
        lambda: kl.Pairwise(epilogue=given),
        lambda: kl.KroneckerSparse(6, 4, 4, 1, epilogue=(kl.Bias(), given)),
        lambda: kl.SparseMatmul(given),
    ):
        with pytest.raises(TypeError, match="epilogue must be made of .*" + message):
            make()


def test_what_is_no_stage_is_told_what_to_write():
    with pytest.raises(TypeError, match=r"got the class Square: call it, kernlib.Square\(\)$"):
        kl.Pairwise(inner=kl.Square)
    with pytest.raises(TypeError, match=r"got 'abs': write kernlib.Abs\(\)$"):
        kl.Pairwise(inner="abs")


# Expressions.


@pytest.mark.parametrize(
    ("text", "parameters", "message"),
    [
        ("gain * v", (), r"names 'gain'; .* a parameter, as in Custom\(\.\.\., \('gain',\)\)$"),
        ("a * v", (), r"names 'a'; .* Custom\(\.\.\., \('my_a',\)\)$"),
        ("gain * x", ("gain",), r"The value itself is v.* \('gain', 'my_x'\)\)$"),
        ("expp(v)", (), r"calls 'expp'; known are .*; did you mean exp\?$"),
        ("relu(v)", (), r"calls 'relu'; known are .*; write max\(v, 0\)$"),
    ],
)
def test_a_name_that_an_expression_has_not_is_told_where_it_goes(text, parameters, message):
    with pytest.raises(ValueError, match=message):
        kl.Custom(text, parameters)
