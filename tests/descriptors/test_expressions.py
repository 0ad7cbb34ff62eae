"""The language of epilogues: one tree, and the same value from Python, from torch and in CUDA."""

import math
import re
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernlib as kl
from kernlib.descriptors.expression import FUNCTIONS
from kernlib.jit.compiler import compile_spec
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.epilogue_source import EpilogueSource
from kernlib.runtime import expressions

PYTHON = {
    "abs": abs,
    "cos": math.cos,
    "erf": math.erf,
    "exp": math.exp,
    "expm1": math.expm1,
    "log": math.log,
    "log1p": math.log1p,
    "max": max,
    "min": min,
    "ndtr": statistics.NormalDist().cdf,
    "pow": math.pow,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "pi": math.pi,
    "e": math.e,
}
PARAMETERS = ("gain", "shift")
TAME = ("abs", "cos", "erf", "ndtr", "sin", "tanh")  # defined everywhere and never large


def by_torch(text, v, **parameters):
    epilogue = kl.Custom(text, tuple(n for n in PARAMETERS if re.search(rf"\b{n}\b", text)))
    values = {name: parameters[name] for name in epilogue.parameters}
    return expressions.apply((epilogue,), torch.tensor([v], dtype=torch.float64), values).item()


def by_python(text, v, **parameters):
    return float(eval(text, {"__builtins__": {}}, {**PYTHON, "v": v, **parameters}))


NUMBERS = st.floats(0.25, 4).map(lambda x: repr(round(x, 3))) | st.sampled_from(["1", "2", "pi"])


def larger(parts):
    return st.one_of(
        st.tuples(parts, st.sampled_from("+-*"), parts).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(parts, parts).map(lambda t: f"({t[0]} / (1 + abs({t[1]})))"),
        st.tuples(parts, st.sampled_from([0, 1, 2, 3])).map(lambda t: f"sin({t[0]}) ** {t[1]}"),
        parts.map(lambda t: f"(-{t})"),
        st.tuples(st.sampled_from(TAME), parts).map(lambda t: f"{t[0]}({t[1]})"),
        st.tuples(st.sampled_from(["max", "min"]), parts, parts).map(
            lambda t: f"{t[0]}({t[1]}, {t[2]})"
        ),
        parts.map(lambda t: f"sqrt(abs({t}))"),
        parts.map(lambda t: f"log1p(abs({t}))"),
        parts.map(lambda t: f"expm1(-abs({t}))"),
    )


EXPRESSIONS = st.recursive(st.sampled_from(["v", "gain", "shift"]) | NUMBERS, larger, max_leaves=8)
VALUES = st.floats(-3, 3)


@given(text=EXPRESSIONS, v=VALUES, gain=VALUES, shift=VALUES)
def test_torch_agrees_with_python(text, v, gain, shift):
    expected = by_python(text, v, gain=gain, shift=shift)
    found = by_torch(text, v, gain=gain, shift=shift)
    assert math.isclose(found, expected, rel_tol=1e-7, abs_tol=1e-9)


PRECEDENCE = ["-v ** 2", "2 ** v ** 2", "v / 2 / 4", "v - 1 - 2", "-v * -2", "2 ** -v", "+v", "--v"]


@pytest.mark.parametrize("text", PRECEDENCE)
def test_operators_bind_as_in_python(text):
    assert by_torch(text, 1.5) == pytest.approx(by_python(text, 1.5), rel=1e-14)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_pythons(name):
    text = f"{name}(v)" if FUNCTIONS[name] == 1 else f"{name}(v, 1.25)"
    for v in (0.75, 2.5):
        assert by_torch(text, v) == pytest.approx(by_python(text, v), rel=1e-12)


@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_keep_a_nan(name):
    assert math.isnan(by_torch(f"{name}(v, 1)", math.nan))
    assert math.isnan(by_torch(f"{name}(1, v)", math.nan))


NAMED = {
    "laplace": (kl.Laplace(), {"bandwidth": 2.0}, lambda v: math.exp(-v / 2)),
    "gaussian": (kl.Gaussian(), {"bandwidth": 2.0}, lambda v: math.exp(-v / 8)),
    "matern32": (
        kl.Matern(1.5),
        {"bandwidth": 2.0},
        lambda v: (1 + math.sqrt(3) * v / 2) * math.exp(-math.sqrt(3) * v / 2),
    ),
    "matern52": (
        kl.Matern(2.5),
        {"bandwidth": 2.0},
        lambda v: (1 + math.sqrt(5) * v / 2 + 5 * v * v / 12) * math.exp(-math.sqrt(5) * v / 2),
    ),
    "rational quadratic": (
        kl.RationalQuadratic(),
        {"bandwidth": 2.0, "alpha": 1.5},
        lambda v: (1 + v / 12) ** -1.5,
    ),
    "cauchy": (kl.Cauchy(), {"bandwidth": 2.0}, lambda v: 1 / (1 + v / 4)),
    "power exponential": (
        kl.PowerExponential(),
        {"bandwidth": 2.0, "q": 0.7},
        lambda v: math.exp(-((v / 2) ** 0.7)),
    ),
    "polynomial": (kl.Polynomial(3), {"gamma": 0.5, "offset": 2.0}, lambda v: (v / 2 + 2) ** 3),
    "scale": (kl.Scale(), {"scale": -3.0}, lambda v: -3 * v),
}


@pytest.mark.parametrize("name", NAMED)
def test_every_epilogue_is_its_formula(name):
    epilogue, parameters, formula = NAMED[name]
    v = torch.tensor([0.0, 0.3, 1.0, 7.5], dtype=torch.float64)
    found = expressions.apply((epilogue,), v, parameters)
    expected = torch.tensor([formula(x) for x in v.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_a_chain_applies_from_left_to_right():
    chain = (kl.Scale(), kl.Custom("v + 1"), kl.Custom("v * v"))
    assert expressions.apply(chain, torch.tensor([2.0]), {"scale": 3.0}).item() == 49


def cuda(*epilogues):
    return EpilogueSource(tuple(epilogues), "EPILOGUE")


def test_parameters_are_read_in_order_from_their_slots():
    source = cuda(kl.RationalQuadratic(), kl.Scale("gain"))
    assert source.members[:3] == [
        ("parameter_bandwidth", "read(EPILOGUE + 0)"),
        ("parameter_alpha", "read(EPILOGUE + 1)"),
        ("parameter_gain", "read(EPILOGUE + 2)"),
    ]


def test_a_division_by_a_parameter_becomes_one_reciprocal_of_the_thread():
    source = cuda(kl.Custom("v / w + exp(v / w)", ("w",)))
    reciprocals = [value for _, value in source.members if "reciprocal" in value]
    assert reciprocals == ["reciprocal(parameter_w)"]
    assert "/" not in "".join(source.steps)
    assert source.steps[0].count("constant_1") == 2


def test_what_needs_no_v_is_computed_once():
    source = cuda(kl.Custom("v * exp(w * u) + sqrt(exp(w * u)) * v", ("w", "u")))
    values = [value for _, value in source.members]
    assert values.count("(parameter_w * parameter_u)") == 1
    assert sum(value.startswith("exp(") for value in values) == 1
    assert "exp" not in source.steps[0] and "sqrt" not in source.steps[0]
    assert "parameter_" not in source.steps[0]


def test_members_come_before_the_members_that_use_them():
    for epilogue in (kl.Gaussian(), kl.Matern(2.5), kl.RationalQuadratic(), kl.Cauchy()):
        known = set()
        for name, value in cuda(epilogue).members:
            assert set(re.findall(r"(?:parameter|constant)_\w+", value)) <= known
            known.add(name)


@pytest.mark.parametrize("degree", [1, 2, 3, 16])
def test_small_integer_powers_are_multiplications(degree):
    assert cuda(kl.Custom(f"v ** {degree}")).steps == [f"integer_power<{degree}>(v)"]
    assert "power(" not in cuda(kl.Polynomial(degree)).steps[0].replace("integer_power<", "<")


@pytest.mark.parametrize("exponent", ["17", "0.5", "-2", "0", "w"])
def test_other_powers_are_the_general_one(exponent):
    parameters = ("w",) if exponent == "w" else ()
    step = cuda(kl.Custom(f"v ** {exponent}", parameters)).steps[0]
    assert step.startswith("power(v, ")


ALLOWED = re.compile(r"AccT\([0-9.e+-]+\)|integer_power<\d+>|\w+_\w+|log1p|expm1")


@given(text=EXPRESSIONS)
def test_every_literal_has_the_arithmetics_type(text):
    source = cuda(kl.Custom(text, tuple(n for n in PARAMETERS if re.search(rf"\b{n}\b", text))))
    texts = [*source.steps, *(value for name, value in source.members if "parameter" not in name)]
    for found in texts:
        assert not re.search(r"\d", ALLOWED.sub("", found)), found


EVERY = " + ".join(
    f"{name}(v * w)" if count == 1 else f"{name}(v, {name}(w, 1.5))"
    for name, count in FUNCTIONS.items()
)


def same_type(text):
    """A line that refuses an expression which a double literal or function has promoted."""
    return f'static_assert(sizeof({text}) == sizeof(AccT), "promoted");\n'


def spec_of(epilogue, acc):
    source = cuda(epilogue)
    declared = "".join(
        f"    {same_type(value)}    AccT {name} = {value};\n" for name, value in source.members
    )
    text = (
        '#include "common/types.cuh"\n#include "common/math.cuh"\n'
        f"using AccT = {acc};\n"
        'extern "C" __global__ void entry(AccT* out, const AccT* given) {\n'
        "    auto read = [&](int index) { return given[index]; };\n"
        f"    enum {{ EPILOGUE = 0 }};\n{declared}    AccT v = *out;\n"
        + "".join(f"    {same_type(step)}    v = {step};\n" for step in source.steps)
        + "    *out = v;\n}\n"
    )
    return KernelSpec("expressions", text, "entry", 32, description="expression test")


@pytest.mark.parametrize("acc", ["float", "double"])
@pytest.mark.parametrize("text", [EVERY, "v ** 3 + v ** w + v ** -2.5 + 2 ** v / w + pi * e * 0.1"])
def test_everything_compiles_for_both_types(text, acc):
    made = compile_spec(spec_of(kl.Custom(text, ("w",)), acc), "sm_90a")
    assert made.cubin[:4] == b"\x7fELF"
