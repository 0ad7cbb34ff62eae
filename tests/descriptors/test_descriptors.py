"""Descriptors: plain frozen values with the same bytes in every process, refused when senseless."""

import copy
import dataclasses
import hashlib
import itertools
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

import kernlib as kl
from kernlib.canonical import encode
from kernlib.descriptors.expression import FUNCTIONS
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import exp_power_sum

NAMED = {
    "l1": kl.l1_distance(),
    "l2": kl.l2_distance(),
    "squared": kl.squared_distance(),
    "p": kl.p_distance(),
    "power_sum": kl.power_sum(),
    "dot": kl.dot_product(),
    "laplace_l1": kl.laplace_l1(),
    "laplace_l2": kl.laplace_l2(),
    "laplace_pq": kl.laplace_pq(),
    "gaussian": kl.gaussian(),
    "matern32": kl.matern32(),
    "matern52": kl.matern52(),
    "rational_quadratic": kl.rational_quadratic(),
    "cauchy": kl.cauchy(),
    "polynomial": kl.polynomial(5),
    "exp_power_sum": exp_power_sum(),
    "power_log": kl.Pairwise(inner=stages.PowerLog()),
    "symmetric": kl.l1_distance(symmetric=True),
    "direct": kl.l2_distance(direct=True),
    "tf32": kl.dot_product(precision="tf32"),
    "custom": kl.Pairwise(epilogue=kl.Custom("tanh(gain * v) + shift", ("gain", "shift"))),
    "chain": kl.l1_distance(epilogue=(kl.Laplace(), kl.Scale(), kl.Custom("v + 1"))),
}

# Tuned choices are kept under keys made of these bytes: a change here forgets every user's.
GOLDEN = {
    "l1": "471019e8da385a4327770aaa5edca0997ee0417be2d0ae9271e7b1037280238c",
    "laplace_pq": "bc6132a85d0c6cce1d0871fefd6e8a4abaea6c909ef050bc41a11eda741b5d79",
    "chain": "fd398323619a33c2dcedfb16ff1b3da335da22334e89545296bfed589b656f1a",
}


@pytest.fixture(params=NAMED, ids=str)
def descriptor(request):
    return NAMED[request.param]


def rebuilt(value):
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, rebuilt, lambda d: d.replace()])
def test_a_clone_is_equal_in_value_hash_and_bytes(descriptor, clone):
    other = clone(descriptor)
    assert other == descriptor
    assert hash(other) == hash(descriptor)
    assert other.canonical() == descriptor.canonical()


def test_no_field_can_be_changed_or_added(descriptor):
    for name in (*(f.name for f in dataclasses.fields(descriptor)), "surprise"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(descriptor, name, "other")


def test_different_descriptors_differ_in_value_and_bytes():
    assert len(set(NAMED.values())) == len(NAMED)
    assert len({d.canonical() for d in NAMED.values()}) == len(NAMED)


STAGES = (
    kl.Identity, kl.Abs, kl.Square, kl.Sqrt, kl.Power, kl.Root, stages.ExpPower, stages.PowerLog,
)  # fmt: skip


@pytest.mark.parametrize("kind", STAGES)
def test_a_stage_equals_those_of_its_class_alone_and_cannot_be_changed(kind):
    stage = kind()
    clones = [pickle.loads(pickle.dumps(stage, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*clones, copy.copy(stage), copy.deepcopy(stage), dataclasses.replace(stage)):
        assert type(other) is kind and other == stage and hash(other) == hash(stage)
    assert [other for other in STAGES if other() == stage] == [kind]
    assert repr(stage) == f"{kind.__name__}()" and not hasattr(stage, "__dict__")
    with pytest.raises(AttributeError):
        stage.surprise = 1


def test_two_ways_to_say_the_same_are_equal():
    assert kl.Pairwise(epilogue=[kl.Laplace()]) == kl.Pairwise(epilogue=kl.Laplace())
    assert kl.Pairwise(epilogue=None) == kl.Pairwise() == kl.l1_distance()
    assert kl.Custom("v * s", ["s"]) == kl.Custom("v * s", ("s",))


def test_a_replaced_field_is_validated():
    assert kl.l1_distance().replace(symmetric=True).symmetric
    with pytest.raises(ValueError, match="operator must be one of"):
        kl.l1_distance().replace(operator="sum")


CHILD = """
import pickle, sys
import kernlib as kl
sent = pickle.loads(sys.stdin.buffer.read())
known = {kl.laplace_l1(): "laplace", kl.p_distance(): "p"}
print(known[sent[0]], sent[1] in known, *(d.canonical().hex() for d in sent))
"""


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_pickles_and_bytes_hold_in_a_process_with_another_hash_seed(seed):
    sent = [kl.laplace_l1(), kl.matern52(), *NAMED.values()]
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(sent),
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": seed},
        check=True,
    )
    name, strange, *canonical = run.stdout.decode().split()
    assert (name, strange) == ("laplace", "False")
    assert canonical == [d.canonical().hex() for d in sent]


@pytest.mark.parametrize("name", GOLDEN)
def test_the_canonical_bytes_are_those_of_every_earlier_release(name):
    assert hashlib.sha256(NAMED[name].canonical()).hexdigest() == GOLDEN[name]


ALIKE = [1, 1.0, True, "1", b"1", (1,), ((1,),), (1, 1), None, "", b"", (), 0, 0.0, -0.0, False]


@pytest.mark.parametrize(("x", "y"), list(itertools.combinations(range(len(ALIKE)), 2)))
def test_values_that_look_alike_have_different_bytes(x, y):
    assert encode(ALIKE[x]) != encode(ALIKE[y])


def test_neighbours_in_a_tuple_do_not_run_together():
    assert encode(("ab", "c")) != encode(("a", "bc"))
    assert encode(((1, 2), 3)) != encode((1, (2, 3)))


@pytest.mark.parametrize("value", [[1], {1: 2}, {1}, object(), len, kl.Pairwise, 1j])
def test_what_has_no_canonical_bytes_is_refused(value):
    with pytest.raises(TypeError, match="no canonical bytes"):
        encode(value)
    with pytest.raises(TypeError, match="no canonical bytes"):
        encode((1, value))


CALLED = (
    "cauchy", "dot_product", "exp_power_sum", "gaussian", "l1_distance", "l2_distance",
    "laplace_l1", "laplace_l2", "laplace_pq", "matern32", "matern52", "p_distance", "polynomial",
    "power_sum", "rational_quadratic", "squared_distance",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_a_descriptor_is_called_as_the_function_that_makes_it(name):
    made = getattr(kl, name)
    wanted = "polynomial(degree=3" if name == "polynomial" else name
    assert made().describe() == wanted + ")" * ("(" in wanted)
    flags = made(symmetric=True, direct=True).describe()
    assert flags == wanted + (", " if "(" in wanted else "(") + "symmetric, direct)"


@pytest.mark.parametrize("name", CALLED)
def test_equal_calls_get_the_same_descriptor(name):
    made = getattr(kl, name)
    other = {"symmetric": True, "direct": True}
    assert made() is made() and made(**other) is made(**other) != made()
    assert made() == made().replace() is not made()


def test_values_that_python_takes_for_equal_are_told_apart():
    kl.gaussian(symmetric=True), kl.gaussian(categories=1), kl.polynomial(1), kl.polynomial(2)
    for call, message in {
        lambda: kl.gaussian(symmetric=1): "symmetric must be a bool, got 1",
        lambda: kl.gaussian(categories=True): "categories must be an int, got True",
        lambda: kl.gaussian(categories=1.0): "categories must be an int, got 1.0",
    }.items():
        with pytest.raises(TypeError, match=message):
            call()
    for degree in (True, 2.0):
        with pytest.raises(ValueError, match=f"from 1 to 16, got {degree}"):
            kl.polynomial(degree)


def test_what_cannot_be_hashed_is_taken_or_refused_as_ever():
    parts = kl.Relu(), kl.Scale()
    assert kl.l1_distance(epilogue=[*parts]) == kl.l1_distance(epilogue=parts)
    with pytest.raises(ValueError, match=r"precision must be None or .*, got \[\]") as raised:
        kl.gaussian(precision=[])
    assert raised.value.__context__ is None  # nothing of a cache


@pytest.mark.parametrize("name", CALLED)
def test_a_compiled_function_may_name_a_descriptor(name):
    def call(a, b):
        made = getattr(kl, name)()
        numbers = {each: 1.5 for each in made.required}
        return kl.run_kernel(made, a, b, **numbers)

    torch.compiler.reset()  # of the other names, whose program is this one
    run = torch.compile(call, backend="eager", fullgraph=True)
    tensors = torch.rand(5, 3), torch.rand(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(run(*tensors), call(*tensors))


def test_names_of_what_has_more_than_a_name():
    waves = kl.l2_distance(epilogue=(kl.Custom("v * gain", ("gain",)), kl.Scale()))
    assert waves.describe().startswith("l2_distance(Custom(") and "Scale(" in waves.describe()
    scaled = kl.squared_distance(epilogue=(kl.Gaussian(), kl.Scale()))
    assert scaled.describe() == f"gaussian({kl.Scale()})"
    assert kl.polynomial(5).describe() == "polynomial(degree=5)"
    other = kl.Pairwise("dot", kl.Abs(), kl.Sqrt())
    assert other.describe() == "Pairwise(op=dot, inner=Abs(), outer=Sqrt())"


REFUSED = {
    "operator": (lambda: kl.Pairwise("sum"), "'difference', 'dot'.*'sum'"),
    "root without power": (lambda: kl.Pairwise(outer=kl.Root()), r"Root\(\) needs inner=Power\(\)"),
    "precision": (lambda: kl.Pairwise(precision="fp8"), "'fp32', 'tf32', 'bf16'.*'fp8'"),
    "symmetric signed": (
        lambda: kl.Pairwise(inner=kl.Identity(), symmetric=True),
        r"inner\(-v\) = inner\(v\).*Identity",
    ),
    "symmetric sqrt": (lambda: kl.Pairwise(inner=kl.Sqrt(), symmetric=True), "symmetric.*Sqrt"),
    "two bandwidths": (
        lambda: kl.Pairwise(epilogue=(kl.Laplace(), kl.Gaussian())),
        "share.*'bandwidth'.*rename",
    ),
    "two scales": (lambda: kl.Pairwise(epilogue=(kl.Scale(), kl.Scale())), "share.*'scale'"),
    "matern": (lambda: kl.Matern(0.5), "1.5 or 2.5.*0.5"),
    "degree 0": (lambda: kl.Polynomial(0), "from 1 to 16, got 0"),
    "degree 17": (lambda: kl.Polynomial(17), "from 1 to 16, got 17"),
    "degree float": (lambda: kl.Polynomial(2.0), "from 1 to 16, got 2.0"),
    "degree bool": (lambda: kl.Polynomial(True), "from 1 to 16, got True"),
    "scale's name": (lambda: kl.Scale("2x"), "'2x' is not an ASCII identifier"),
    "unknown function": (lambda: kl.Custom("sinh(v)"), "calls 'sinh'; known are abs"),
    "unknown name": (lambda: kl.Custom("v * w"), "names 'w'; known are v"),
    "name of no parameter": (lambda: kl.Custom("v * w", ("u",)), "names 'w'; known are u, v"),
    "arity": (lambda: kl.Custom("max(v)"), r"max takes 2 argument\(s\), got 1"),
    "syntax": (lambda: kl.Custom("v +"), "does not parse"),
    "empty": (lambda: kl.Custom(""), "does not parse"),
    "statement": (lambda: kl.Custom("v = 1"), "does not parse"),
    "attribute": (lambda: kl.Custom("v.real"), "'v.real' is not part of the language"),
    "call of a call": (lambda: kl.Custom("exp(v)(v)"), "not part of the language"),
    "lambda": (lambda: kl.Custom("lambda: v"), "'lambda: v' is not part of the language"),
    "string": (lambda: kl.Custom("v * 'x'"), "not part of the language"),
    "comparison": (lambda: kl.Custom("v < 1"), "'v < 1' is not part of the language"),
    "subscript": (lambda: kl.Custom("v[0]"), "not part of the language"),
    "walrus": (lambda: kl.Custom("(v := 1)"), "not part of the language"),
    "power": (lambda: kl.Custom("v^2"), r"'v\^2' is not part of .*; a power is v\*\*2$"),
    "position": (lambda: kl.Custom("v + row"), "names 'row'.*positions are known to scores and"),
    "condition": (lambda: kl.Custom("v * (v < 1)"), "Conditions and whole numbers.*of scores and"),
    "quotient": (lambda: kl.Custom("v // 2"), "'v // 2'.*whole numbers are parts of scores and"),
    "where": (lambda: kl.Custom("where(v, 1, 0)"), "'where'.*where is part of scores and masks of"),
    "unused parameter": (lambda: kl.Custom("v", ("w",)), r"does not use \['w'\]"),
    "repeated parameter": (lambda: kl.Custom("v * w", ("w", "w")), "repeat"),
    "parameter v": (lambda: kl.Custom("v", ("v",)), "'v' is taken by the language of"),
    "parameter p": (lambda: kl.Custom("v * p", ("p",)), "'p' is taken by arguments of calls"),
    "parameter keyword": (lambda: kl.Custom("v", ("lambda",)), "'lambda'"),
    "parameter unicode": (lambda: kl.Custom("v * ä", ("ä",)), "'ä' is not an ASCII identifier"),
    "parameter number": (lambda: kl.Custom("v", (1,)), "1 is not an ASCII identifier"),
    "infinite literal": (lambda: kl.Custom("v * 1e999"), "1e999"),
    "endless literal": (lambda: kl.Custom("v * 1" + 400 * "0"), "10000"),
}
RESERVED = (
    "p", "inner_p", "outer_p", "epsilon", "regularization", "out", "accumulate", "debug", "a", "b",
    "descriptor", "lengthscale", "row_offset", "col_offset", "pi", "e", *FUNCTIONS,
)  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_and_said_why(case):
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_cannot_be_parameters(name):
    with pytest.raises(ValueError, match=f"{name!r} is taken"):
        kl.Custom(f"v * {name}", (name,))
    with pytest.raises(ValueError, match=f"{name!r} is taken"):
        kl.Scale(name)


WRONG_PARTS = {
    "inner": (lambda: kl.Pairwise(inner=kl.Root()), r"inner must be one of.*Power\(\).*Root"),
    "outer": (lambda: kl.Pairwise(outer="sqrt"), r"outer must be one of.*Root\(\).*'sqrt'"),
    "epilogue part": (lambda: kl.Pairwise(epilogue=(kl.Scale(), 3)), "such as Laplace.*3"),
    "symmetric": (lambda: kl.Pairwise(symmetric=1), "symmetric must be a bool, got 1"),
    "direct": (lambda: kl.Pairwise(direct=None), "direct must be a bool, got None"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_parts_of_another_kind_are_type_errors(case):
    build, message = WRONG_PARTS[case]
    with pytest.raises(TypeError, match=message):
        build()


def test_parameters_of_a_chain_come_in_order_and_know_their_range():
    chain = (kl.RationalQuadratic(), kl.Scale("gain"), kl.Custom("v + shift", ("shift",)))
    built = kl.squared_distance(epilogue=chain)
    assert built.parameters == ("bandwidth", "alpha", "gain", "shift")
    assert built.positive == {"bandwidth", "alpha"}


def test_renamed_scales_compose():
    built = kl.Pairwise(epilogue=(kl.Scale("first"), kl.Laplace(), kl.Scale("second")))
    assert built.parameters == ("first", "bandwidth", "second")
