"""Descriptors of Kronecker-sparse factors and chains, and the epilogues that came with them."""

import copy
import hashlib
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import kernlib as kl
from kernlib.descriptors.base import Value
from kernlib.descriptors.text import from_text, to_text
from kernlib.jit.compiler import compile_spec
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.epilogue_source import EpilogueSource
from kernlib.runtime import expressions

FACTOR = kl.KroneckerSparse(2, 3, 5, 4)
FULL = kl.KroneckerSparse(
    6, 64, 48, 2, batch_last=True, epilogue=(kl.Bias(), kl.Gelu("tanh")), precision="tf32"
)
CHAIN = kl.KroneckerSparseChain(
    (
        kl.KroneckerSparse(2, 48, 192, 1, epilogue=kl.Bias("b1")),
        kl.KroneckerSparse(1, 192, 48, 2, epilogue=(kl.Bias("b2"), kl.LeakyRelu(0.2))),
    )
)
NAMED = {"factor": FACTOR, "full": FULL, "chain": CHAIN}

# Saved programs hold these texts, and kernels are kept under keys made of these bytes.
TEXTS = {
    "factor": "KroneckerSparse(a=2, b=3, c=5, d=4, batch_last=False, epilogue=(), precision=None)",
    "full": "KroneckerSparse(a=6, b=64, c=48, d=2, batch_last=True, "
    "epilogue=(Bias(parameter='bias'), Gelu(approximate='tanh')), precision='tf32')",
    "chain": "KroneckerSparseChain(factors=(KroneckerSparse(a=2, b=48, c=192, d=1, "
    "batch_last=False, epilogue=(Bias(parameter='b1'),), precision=None), KroneckerSparse(a=1, "
    "b=192, c=48, d=2, batch_last=False, epilogue=(Bias(parameter='b2'), "
    "LeakyRelu(negative_slope=0.2)), precision=None)))",
}


def rebuilt(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", NAMED)
def test_the_text_is_that_of_every_earlier_release_and_of_every_clone(name):
    made = NAMED[name]
    assert to_text(made) == made.text == TEXTS[name]
    assert from_text(TEXTS[name]) == made
    for clone in (copy.copy, copy.deepcopy, rebuilt, lambda d: d.replace()):
        other = clone(made)
        assert other == made and hash(other) == hash(made)
        assert other.text == made.text and other.canonical() == made.canonical()


def test_descriptors_differ_in_value_text_and_bytes():
    made = [FACTOR, FULL, CHAIN, kl.KroneckerSparseChain((FACTOR,))]
    made += [FACTOR.replace(**change) for change in ({"a": 3}, {"batch_last": True})]
    made += [FACTOR.replace(epilogue=e) for e in (kl.Relu(), kl.Silu(), kl.Sigmoid(), kl.Tanh())]
    for each in (set, lambda x: {d.text for d in x}, lambda x: {d.canonical() for d in x}):
        assert len(each(made)) == len(made)


sizes = st.integers(1, 2000)


@given(sizes, sizes, sizes, sizes, st.booleans(), st.sampled_from([None, "fp32", "tf32", "bf16"]))
def test_what_follows_from_the_pattern(a, b, c, d, batch_last, precision):
    made = kl.KroneckerSparse(a, b, c, d, batch_last=batch_last, precision=precision)
    assert made.pattern == made.weight_shape == (a, b, c, d)
    assert (made.in_features, made.out_features) == (a * c * d, a * b * d)
    assert made.density * made.in_features * made.out_features == pytest.approx(a * b * c * d)
    turned = made.transposed()
    assert turned.pattern == (a, c, b, d) and turned.transposed() == made
    assert (turned.batch_last, turned.precision) == (batch_last, precision)
    assert from_text(made.text) == made


def test_the_transposed_product_has_no_epilogue():
    assert FULL.transposed() == kl.KroneckerSparse(6, 48, 64, 2, batch_last=True, precision="tf32")


def test_parameters_come_in_order_and_know_their_kind():
    made = kl.KroneckerSparse(
        1, 2, 3, 4, epilogue=(kl.Bias(), kl.Scale(), kl.Matern(), kl.Bias("late"))
    )
    assert made.parameters == ("bias", "scale", "bandwidth", "late")
    assert made.vectors == ("bias", "late") and made.positive == {"bandwidth"}
    assert CHAIN.parameters == CHAIN.vectors == ("b1", "b2") and CHAIN.positive == frozenset()


def test_a_chain_has_the_ends_of_its_factors():
    assert (CHAIN.in_features, CHAIN.out_features, CHAIN.batch_last) == (384, 384, False)
    assert kl.KroneckerSparseChain(FACTOR).factors == FACTOR.factors == (FACTOR,)
    assert kl.KroneckerSparseChain([FACTOR]) == kl.KroneckerSparseChain((FACTOR,))


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]

VALUE_ERRORS = {
    "a 0": (lambda: kl.KroneckerSparse(0, 1, 1, 1), "a must be at least 1, got 0"),
    "d -1": (lambda: kl.KroneckerSparse(1, 1, 1, -1), "d must be at least 1, got -1"),
    "precision": (lambda: FACTOR.replace(precision="fp8"), "precision must be .*'fp8'"),
    "two biases": (lambda: FACTOR.replace(epilogue=(kl.Bias(), kl.Bias())), "share.*'bias'"),
    "empty chain": (lambda: kl.KroneckerSparseChain(()), "at least one"),
    "sizes": (
        lambda: kl.KroneckerSparseChain((FACTOR, FACTOR)),
        r"factors\[1\] KroneckerSparse\(2, 3, 5, 4\) takes 40 features, and factors\[0\] .* 24",
    ),
    "layouts": (
        lambda: kl.KroneckerSparseChain((FACTOR, kl.KroneckerSparse(1, 2, 24, 1, batch_last=True))),
        r"factors\[1\] .* has batch_last=True, and factors\[0\] False",
    ),
    "names": (
        lambda: kl.KroneckerSparseChain(
            (FULL, kl.KroneckerSparse(1, 2, 768, 1, batch_last=True, epilogue=kl.Bias()))
        ),
        r"factors\[1\] .* repeats the parameter\(s\) \['bias'\]",
    ),
    "bias of pairs": (
        lambda: kl.l2_distance(epilogue=kl.Bias()),
        r"Bias\(parameter='bias'\) needs one value for each output feature, and a pairwise",
    ),
    "bias named x": (lambda: kl.Bias("x"), "'x' is taken"),
    "bias named weight": (lambda: kl.Bias("weight"), "'weight' is taken"),
    "slope of many": (lambda: kl.LeakyRelu(10**5000), "negative_slope .*, got int of many digits"),
    "a of many digits": (lambda: kl.KroneckerSparse(10**5000, 1, 1, 1), "must be below"),
    "-a of many": (lambda: kl.KroneckerSparse(-(10**5000), 1, 1, 1), "a must be at least 1"),
    "too large": (lambda: kl.KroneckerSparse(2**30, 1, 1, 2**30), r"below 2\*\*60, got 1152"),
    "a null byte": (lambda: kl.Custom("v\0"), "does not parse"),
    "a lone surrogate": (lambda: kl.Custom("\ud800"), "does not parse"),
}  # fmt: skip

TYPE_ERRORS = {
    "a bool": (lambda: kl.KroneckerSparse(True, 1, 1, 1), "a must be an int, got True"),
    "b float": (lambda: kl.KroneckerSparse(1, 2.0, 1, 1), r"b must be an int, got 2\.0"),
    "batch_last": (lambda: FACTOR.replace(batch_last=1), "batch_last must be a bool, got 1"),
    "epilogue": (lambda: FACTOR.replace(epilogue=kl.Relu), "such as Laplace"),
    "positions": (lambda: kl.KroneckerSparse(1, 1, 1, 1, True), "positional"),
    "factors": (lambda: kl.KroneckerSparseChain("f"), "factors must be a tuple"),
    "a tuple": (
        lambda: kl.KroneckerSparseChain((FACTOR, (1, 2, 24, 1))),
        r"factors\[1\] must be a KroneckerSparse, got \(1, 2, 24, 1\)",
    ),
    "deep": (lambda: FACTOR.replace(epilogue=DEEP), r"epilogue must be made of .*got \[\["),
    "a deep chain": (
        lambda: kl.KroneckerSparseChain((DEEP,)),
        r"factors\[0\] must be a Kron",
    ),
}


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_what_makes_no_sense_is_refused_and_said_why(case):
    build, message = VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_parts_of_another_kind_are_type_errors(case):
    build, message = TYPE_ERRORS[case]
    with pytest.raises(TypeError, match=message):
        build()


# Epilogues.

ACTIVATIONS = {
    "relu": (kl.Relu(), F.relu),
    "gelu tanh": (kl.Gelu("tanh"), lambda v: F.gelu(v, approximate="tanh")),
    "silu": (kl.Silu(), F.silu),
    "sigmoid": (kl.Sigmoid(), torch.sigmoid),
    "tanh": (kl.Tanh(), torch.tanh),
    "leaky": (kl.LeakyRelu(), F.leaky_relu),
    "leaky 0.3": (kl.LeakyRelu(0.3), lambda v: F.leaky_relu(v, 0.3)),
    "leaky -2": (kl.LeakyRelu(-2), lambda v: F.leaky_relu(v, -2.0)),
}
EVERYWHERE = torch.cat(
    (torch.linspace(-30, 30, 601), torch.tensor([-1e4, 1e4, -1e30, 1e30, -1e-30, 0.0]))
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_torchs_with_its_derivatives_and_overflows_nowhere(name, dtype):
    epilogue, wanted = ACTIVATIONS[name]
    results = []
    for function in (lambda v: expressions.apply((epilogue,), v, {}), wanted):
        v = EVERYWHERE.to(dtype).requires_grad_()
        y = function(v)
        slope = torch.autograd.grad(y.sum(), v, create_graph=True)[0]
        curve = torch.zeros_like(v)
        if slope.requires_grad:
            curve = torch.autograd.grad(slope.sum(), v, allow_unused=True)[0]
        results.append((y, slope, torch.zeros_like(v) if curve is None else curve))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for found, expected in zip(*results, strict=True):
        kept = expected.isfinite()
        assert found[kept].isfinite().all() and kept[:-6].all()
        torch.testing.assert_close(found[kept], expected[kept], rtol=1e-5, atol=tolerance)


def test_a_small_sigmoid_keeps_its_relative_accuracy():
    v = torch.linspace(-80, 0, 1000)
    found = expressions.apply((kl.Sigmoid(),), v, {})
    wanted = torch.sigmoid(v.double())
    assert ((found - wanted).abs() / wanted).max() < 1e-6


@pytest.mark.parametrize("axis", [0, -1])
def test_a_vector_lies_along_the_features(axis):
    v = torch.randn((4, 2, 3) if axis == 0 else (2, 3, 4), dtype=torch.float64)
    bias = torch.arange(4.0, dtype=torch.float64)
    found = expressions.apply((kl.Bias(),), v, {"bias": bias}, axis)
    for feature in range(4):
        torch.testing.assert_close(
            found.select(axis, feature), v.select(axis, feature) + feature, rtol=0, atol=0
        )


def test_expressions_are_differentiable_in_everything():
    chain = (kl.Scale(), kl.Bias(), kl.Custom("v * tanh(gain * v) + max(gain, 0.5)", ("gain",)))
    options = {"dtype": torch.float64, "requires_grad": True}
    tensors = [torch.randn(3, 4, **options), torch.randn(4, **options)]
    tensors += [torch.tensor(0.7, **options), torch.tensor(1.3, **options)]

    def call(v, bias, scale, gain):
        given = {"bias": bias, "scale": scale, "gain": gain}
        return expressions.apply(chain, v, given)

    assert torch.autograd.gradcheck(call, tensors)
    assert torch.autograd.gradgradcheck(call, tensors)


def test_an_expression_of_numbers_alone_fills_the_shape():
    for text in ("2 * pi", "max(1, 3) ** 2", "sqrt(2)", "5", "gain", "gain / 2"):
        names = ("gain",) if "gain" in text else ()
        v = torch.zeros(2, 3, dtype=torch.float64)
        found = expressions.apply((kl.Custom(text, names),), v, {name: 3 for name in names})
        known = {"pi": math.pi, "max": max, "sqrt": math.sqrt, "gain": 3}
        assert found.shape == (2, 3)
        torch.testing.assert_close(found, v + eval(text, known), rtol=1e-12, atol=0)


PLAIN = [kl.Relu, kl.Silu, kl.Sigmoid, kl.Tanh, kl.Laplace, kl.Gaussian, kl.Cauchy,
         kl.RationalQuadratic, kl.PowerExponential]  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN)
def test_epilogues_without_fields_are_values(kind):
    made = kind()
    assert isinstance(made, Value) and made == kind() and hash(made) == hash(kind())
    assert repr(made) == f"{kind.__name__}()"
    for clone in (copy.copy, copy.deepcopy, rebuilt):
        assert clone(made) == made and type(clone(made)) is kind
    assert not any(made == other() for other in PLAIN if other is not kind)
    for name in ("expression", "surprise"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(made, name, 1)
    with pytest.raises(ValueError, match="'Value' is no type"):
        from_text("KroneckerSparse(a=1, b=1, c=1, d=1, epilogue=(Value(),))")


def test_every_epilogue_has_bytes_of_its_own():
    made = [kind() for kind in PLAIN] + [kl.Gelu(), kl.Gelu("tanh"), kl.Bias(), kl.Bias("late")]
    digests = {hashlib.sha256(FACTOR.replace(epilogue=e).canonical()).digest() for e in made}
    assert len(digests) == len(made)


# CUDA text.


def test_vectors_are_counted_apart_from_scalars():
    chain = (kl.Scale(), kl.Bias("first"), kl.Custom("v * gain", ("gain",)), kl.Bias("second"))
    text = EpilogueSource(chain, "BEGIN")
    assert text.vectors == [("vector_0", "read.vector(0)"), ("vector_1", "read.vector(1)")]
    assert text.members == [
        ("parameter_scale", "read(BEGIN + 0)"),
        ("parameter_gain", "read(BEGIN + 1)"),
    ]
    assert text.steps == [
        "(parameter_scale * v)",
        "(v + convert<AccT>(vector_0[feature]))",
        "(v * parameter_gain)",
        "(v + convert<AccT>(vector_1[feature]))",
    ]


def test_factors_that_name_their_biases_apart_share_their_text():
    one, other = (EpilogueSource((kl.Bias(name), kl.Relu()), "0") for name in ("b1", "b2"))
    assert (one.vectors, one.members, one.steps) == (other.vectors, other.members, other.steps)


class Row(kl.Bias):
    """An epilogue whose vector stands in all places that scalars move out of."""

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "v / bias + exp(bias) * v ** bias / sqrt(bias)"


def test_what_depends_on_a_vector_is_computed_for_each_element():
    text = EpilogueSource((Row(),), "0")
    assert text.members == [] and text.steps[0].count("vector_0[feature]") == 4


@pytest.mark.parametrize("kind", ["float", "half_t", "bfloat16_t"])
@pytest.mark.parametrize("name", ["row", *ACTIVATIONS])
def test_every_activation_compiles(name, kind):
    epilogue = Row() if name == "row" else ACTIVATIONS[name][0]
    text = EpilogueSource((kl.Bias("shift"), kl.Scale(), epilogue), "0")
    declared = "".join(f"    const InputT* {n} = {v};\n" for n, v in text.vectors)
    declared += "".join(f"    AccT {n} = {v};\n" for n, v in text.members)
    steps = "".join(
        f'    static_assert(sizeof({step}) == sizeof(AccT), "promoted");\n    v = {step};\n'
        for step in text.steps
    )
    source = (
        '#include "common/types.cuh"\n#include "common/math.cuh"\n'
        f"using InputT = {kind};\nusing AccT = float;\n"
        "struct Read {\n    const AccT* numbers; const InputT* const* vectors;\n"
        "    __device__ AccT operator()(int i) const { return numbers[i]; }\n"
        "    __device__ const InputT* vector(int k) const { return vectors[k]; }\n};\n"
        'extern "C" __global__ void entry(AccT* out, Read read, int feature) {\n'
        f"{declared}    AccT v = out[feature];\n{steps}    out[feature] = v;\n}}\n"
    )
    spec = KernelSpec("expressions", source, "entry", 32, description="activation test")
    assert compile_spec(spec, "sm_90a").cubin[:4] == b"\x7fELF"
