"""Derivatives of the language of epilogues, against those by autograd of the same expression."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernlib as kl
from kernlib.descriptors import derivative as rules
from kernlib.descriptors.derivative import Derivative, derivative, size
from kernlib.descriptors.expression import FUNCTIONS, Name, Number, Operation, parse
from kernlib.descriptors.text import from_text
from kernlib.families.pairwise.stages_reference import power, square_root
from kernlib.jit.compiler import compile_spec
from kernlib.lowering.epilogue_source import EpilogueSource
from kernlib.runtime import expressions
from tests.descriptors.test_expressions import EXPRESSIONS, PARAMETERS, spec_of
from tests.support.speeds import slow_but

DOUBLE = torch.float64
VALUES = st.floats(-3, 3).map(lambda x: round(x, 9))  # 0 or not near it
FINITE = {"**": power, "pow": power, "sqrt": square_root}
OUTER = {
    "Identity": lambda s, exponent: s,
    "Sqrt": lambda s, exponent: square_root(s),
    "Abs": lambda s, exponent: s.abs(),
    "Square": lambda s, exponent: s * s,
    "Power": power,
}


def number(value):
    return torch.tensor([value], dtype=DOUBLE, requires_grad=True)


def value_of(made, v, values):
    """A derivative at v, which is the root of s for the outer stage "Sqrt"."""
    known = {name: values[name] for name in made.parameters}
    return expressions.apply((made,), v, known, functions=FINITE)


def both(chain, s, values, *, outer="Identity", by="v", limit=None, smallest=1e-300):
    """The derivative by the rules, and by autograd, at values of s."""
    made = Derivative(outer, chain, by, limit is not None, smallest)
    given = {made.limit: limit or 0.0, **values}
    with torch.no_grad():
        found = value_of(made, s.sqrt() if outer == "Sqrt" else s, given)
    s = s.clone().requires_grad_()
    leaf = s if by == "v" else values[by]
    v = OUTER[outer](s, values.get(made.exponent))
    if limit is not None:
        v = torch.where(v.abs() < limit, 0.0, v)
    own = {name: values[name] for each in chain for name in each.parameters}
    total = expressions.apply(chain, v, own, functions=FINITE)
    if not total.requires_grad:
        return found, torch.zeros_like(found)
    (wanted,) = torch.autograd.grad(total.sum(), leaf, allow_unused=True)
    wanted = torch.zeros_like(leaf) if wanted is None else wanted
    return (found if by == "v" else found.sum(0, keepdim=True)), wanted


def custom(text, parameters=PARAMETERS):
    return kl.Custom(text, tuple(n for n in parameters if re.search(rf"\b{n}\b", text)))


@given(text=EXPRESSIONS, v=VALUES, gain=VALUES, shift=VALUES)
def test_the_rules_are_autograds(text, v, gain, shift):
    chain = (custom(text),)
    values = {"gain": number(gain), "shift": number(shift)}
    for by in ("v", *chain[0].parameters):
        found, wanted = both(chain, torch.tensor([v], dtype=DOUBLE), values, by=by)
        if wanted.isfinite().all():
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("by", ["v", "gain"])
def test_every_function_has_its_derivative(name, by):
    text = f"{name}(v * gain)" if FUNCTIONS[name] == 1 else f"{name}(v * gain, gain + 1.25)"
    s = torch.tensor([0.3, 0.8, 1.7, 2.6], dtype=DOUBLE)
    found, wanted = both((custom(text),), s, {"gain": number(0.9)}, by=by)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


EDGES = {  # at v = 0
    "abs(v)": 0.0, "sqrt(v)": 0.0, "v ** 0.5": 0.0, "v ** 1.5": 0.0, "v ** 1": 1.0, "v ** 2": 0.0,
    "max(v, 0)": 0.0, "max(0, v)": 0.0, "max(v + 1, 1)": 1.0, "max(1, 1 + v)": 1.0,
    "min(v, 0)": 1.0, "min(v + 1, 1)": 1.0, "max(v, 2 * v)": 1.5, "min(v, 2 * v)": 1.5,
    "v ** 0": 0.0, "pow(v, 1)": 1.0, "exp(-sqrt(v))": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("text", EDGES)
@pytest.mark.parametrize("smallest", [1e-38, 1e-300])
def test_where_there_is_none_it_is_torchs(text, smallest):
    dtype = torch.float32 if smallest == 1e-38 else DOUBLE
    found, wanted = both((custom(text),), torch.zeros(1, dtype=dtype), {}, smallest=smallest)
    assert found == wanted == EDGES[text]


@pytest.mark.parametrize("gain", [0.3, 1.0, 1.4, 2.0, 3.5])
@pytest.mark.parametrize("by", ["v", "gain"])
def test_powers_of_zero_by_a_parameter(gain, by):
    s = torch.tensor([0.0, 1e-80, 0.5, 2.0], dtype=DOUBLE)
    found, wanted = both((custom("v ** gain"),), s, {"gain": number(gain)}, by=by)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_an_infinite_value_and_a_nan(seed):
    s = torch.tensor([math.inf, math.nan], dtype=torch.float32)
    for outer, chain in (("Sqrt", ()), ("Sqrt", (kl.Relu(),)), ("Identity", (kl.Gaussian(),))):
        found, _ = both(chain, s, {"bandwidth": 2.0}, outer=outer, smallest=1e-38)
        assert found[0] == 0 or chain == (kl.Relu(),)
        assert found[1].isnan() and not found[0].isnan()


CHAINS = {
    "laplace": ((kl.Laplace(),), {"bandwidth": 1.7}),
    "gaussian": ((kl.Gaussian(),), {"bandwidth": 1.7}),
    "matern32": ((kl.Matern(1.5),), {"bandwidth": 1.7}),
    "matern52": ((kl.Matern(2.5),), {"bandwidth": 1.7}),
    "rational": ((kl.RationalQuadratic(),), {"bandwidth": 1.7, "alpha": 0.8}),
    "cauchy": ((kl.Cauchy(),), {"bandwidth": 1.7}),
    "power": ((kl.PowerExponential(),), {"bandwidth": 1.7, "q": 0.6}),
    "polynomial": ((kl.Polynomial(3),), {"gamma": 0.6, "offset": 0.3}),
    "scale": ((kl.Scale(),), {"scale": 0.6}),
    "relu": ((kl.Relu(),), {}),
    "leaky": ((kl.LeakyRelu(0.1),), {}),
    "gelu": ((kl.Gelu(),), {}),
    "gelu tanh": ((kl.Gelu("tanh"),), {}),
    "sigmoid": ((kl.Sigmoid(),), {}),
    "silu": ((kl.Silu(),), {}),
    "tanh": ((kl.Tanh(),), {}),
    "several": (
        (kl.Custom("1 + v * v"), kl.Laplace(), kl.Scale(), kl.Silu()),
        {"bandwidth": 1.7, "scale": 0.6},
    ),
    "nothing": ((), {}),
}


@pytest.mark.parametrize("limit", [None, 0.9])
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("name", CHAINS)
def test_chains_behind_every_outer_stage(name, outer, limit):
    chain, values = CHAINS[name]
    values = {key: number(value) for key, value in values.items()}
    if outer == "Power":
        values["exponent"] = number(0.7)
    s = torch.tensor([0.0, 0.3, 0.8, 1.7, 6.0], dtype=DOUBLE)
    for by in ("v", *values):
        found, wanted = both(chain, s, values, outer=outer, by=by, limit=limit)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["matern32", "matern52"])
def test_maternes_derivative_keeps_its_accuracy_near_zero(name):
    chain, values = CHAINS[name]
    s = torch.tensor([1e-12, 1e-6, 1e-3], dtype=DOUBLE)
    _, wanted = both(chain, s, {key: number(v) for key, v in values.items()}, outer="Sqrt")
    made = Derivative("Sqrt", chain)
    found = value_of(made, s.float().sqrt(), {key: torch.tensor(v) for key, v in values.items()})
    exact = -(2 * 1.5 if name == "matern32" else 5 / 3) / (2 * 1.7**2)  # in the limit
    torch.testing.assert_close(found.double()[:2], torch.full((2,), exact, dtype=DOUBLE),
                               rtol=5e-3, atol=0)  # fmt: skip
    torch.testing.assert_close(found.double()[2:], wanted[2:], rtol=1e-5, atol=0)


# What they look like.


def slope(text, parameters=(), by="v"):
    return derivative(parse(text, parameters), by, 1e-38)


def test_zeros_and_ones_are_left_out():
    assert slope("3 * v + 1") == Number(3.0)
    assert slope("w + 2", ("w",)) == Number(0.0)
    assert slope("v * w", ("w",)) == Name("w")
    assert slope("v - w", ("w",), "w") == Number(-1.0)
    assert slope("-(-v)") == Number(1.0)
    assert slope("v ** 3") == Operation("*", (Number(3.0), parse("v ** 2", ())))
    assert slope("exp(v)") == parse("exp(v)", ())


def test_constants_are_computed_once_a_thread():
    for name, (chain, _) in CHAINS.items():
        source = EpilogueSource((Derivative("Identity", chain),), "EPILOGUE")
        if name in ("laplace", "gaussian", "matern52"):
            assert "parameter_" not in source.steps[0], name
            assert "/" not in source.steps[0] and "reciprocal(constant" not in source.steps[0]


def test_names_of_its_own_parameters_are_free():
    chain = (kl.Custom("v * exponent + limit_", ("exponent", "limit_")),)
    made = Derivative("Power", chain, snaps=True)
    assert (made.exponent, made.limit) == ("exponent__", "limit__")
    assert set(made.parameters) == {"exponent", "exponent__", "limit__"}
    assert Derivative("Power", chain, "exponent").parameters == ("exponent__",)


def test_a_kernel_of_it_has_a_text():
    made = Derivative("Sqrt", (kl.Matern(2.5), kl.Scale()), "bandwidth", True, 1e-300)
    kernel = kl.l2_distance(epilogue=made)
    assert from_text(kernel.text) == kernel
    assert made.vectors == made.positive == ()


@given(st.integers(1, 8))
def test_long_chains_do_not_fit(count):
    chain = (kl.Silu(),) * count
    assert rules.fits("Identity", chain, False) == (count < 3)
    if count < 3:
        assert size(Derivative("Identity", chain).tree()) < 2000


@pytest.mark.parametrize("acc", ["float", "double"])
@pytest.mark.parametrize("name", slow_but(("every",), ["every", *CHAINS]))
def test_everything_compiles_for_both_types(name, acc):
    if name == "every":
        text = " + ".join(
            f"{f}(v * w)" if count == 1 else f"{f}(v, {f}(v * w, 1.5))"
            for f, count in FUNCTIONS.items()
        )
        chain, outers, names = (kl.Custom(text, ("w",)),), ("Identity",), ("v", "w")
    else:
        chain, outers = CHAINS[name][0], ("Sqrt", "Power")
        names = ("v", *CHAINS[name][1])
    for outer in outers:
        for by in names:
            made = Derivative(outer, chain, by, True, 1e-38 if acc == "float" else 1e-300)
            if made.tree() != Number(0.0):
                assert compile_spec(spec_of(made, acc), "sm_90a").cubin[:4] == b"\x7fELF"
