"""Descriptors as text: there and back, the same in every release, and never a way in for code."""

import dataclasses
import gc
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kernlib as kl
from kernlib.descriptors import epilogues
from kernlib.descriptors.base import Descriptor, Part, render
from kernlib.descriptors.text import from_text, to_text
from kernlib.families.pairwise import stages

LAPLACE = (
    "Pairwise(operator='difference', inner=Abs(), outer=Identity(), epilogue=(Laplace(),), "
    "precision=None, symmetric=False, direct=False)"
)
CHAIN = (
    "Pairwise(operator='dot', inner=Identity(), outer=Identity(), epilogue=(Polynomial(degree=5), "
    "Custom(expression='tanh(gain * v)', parameters=('gain',))), precision='tf32', symmetric=True, "
    "direct=True)"
)
# Saved programs hold these texts: what they mean must not change.
KNOWN = {
    LAPLACE: kl.laplace_l1(),
    CHAIN: kl.Pairwise(
        "dot", kl.Identity(), epilogue=(kl.Polynomial(5), kl.Custom("tanh(gain * v)", ("gain",))),
        precision="tf32", symmetric=True, direct=True,
    ),
}  # fmt: skip
STAGES = [kl.Identity(), kl.Abs(), kl.Square(), kl.Sqrt(), kl.Power()]
LATER = [stages.ExpPower(), stages.PowerLog()]  # inner stages alone


@pytest.mark.parametrize("text", KNOWN)
def test_the_text_is_that_of_every_earlier_release(text):
    assert to_text(KNOWN[text]) == text
    assert from_text(text) == KNOWN[text]


expressions = st.sampled_from(["v", "v * s", "max(v, s) - t", "  exp(-v)\n", "ｖ * 2"])
epilogue_parts = st.one_of(
    st.sampled_from([kl.Laplace(), kl.Gaussian(), kl.RationalQuadratic(), kl.PowerExponential()]),
    st.builds(kl.Matern, st.sampled_from([1.5, 2.5, np.float64(2.5)])),
    st.builds(kl.Polynomial, st.integers(1, 16)),
    st.builds(kl.Scale, st.from_regex("[a-c]_[0-9]{1,9}", fullmatch=True)),
    expressions.map(lambda e: kl.Custom(e, tuple(n for n in "st" if n in e.replace("tanh", "")))),
)


def distinct(chain) -> bool:
    names = [name for part in chain for name in part.parameters]
    return len(names) == len(set(names))


@given(
    operator=st.sampled_from(["difference", "dot"]),
    inner=st.sampled_from([*STAGES, *LATER]),
    outer=st.sampled_from([*STAGES, kl.Root()]),
    chain=st.lists(epilogue_parts, max_size=3).filter(distinct),
    precision=st.sampled_from([None, "fp32", "tf32", "bf16"]),
    symmetric=st.booleans(),
    direct=st.booleans(),
)
def test_there_and_back_is_the_same(operator, inner, outer, chain, precision, symmetric, direct):
    try:
        made = kl.Pairwise(operator, inner, outer, chain, precision, symmetric, direct)
    except ValueError:  # such as a Root without a Power
        return
    text = to_text(made)
    again = from_text(text)
    assert again == made and again.canonical() == made.canonical()
    assert to_text(again) == text == render(made)


def test_both_ways_are_remembered():
    assert from_text(LAPLACE) is from_text(LAPLACE)
    assert to_text(kl.laplace_l1()) is to_text(kl.laplace_l1())


def test_a_field_that_is_left_out_has_its_default():
    assert from_text(LAPLACE.replace(", direct=False", "")) == kl.laplace_l1()
    assert from_text("Pairwise(epilogue=(Laplace(),))") == kl.laplace_l1()


@dataclasses.dataclass(frozen=True, slots=True)
class FutureFamily(Descriptor):
    """A descriptor of a family to come."""

    sizes: tuple = ()
    scale: float = 1.0
    part: object = None
    _derived: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "_derived", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class FuturePart(Part):
    """A part, neither stage nor epilogue, of a family to come."""

    axis: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class FutureBias(epilogues.Epilogue):
    """An epilogue of a family to come."""

    axis: int = -1


VALUES = [((6, 64), -2.5), (((1,), (), (True, None)), math.inf), (("a'\"\n\\ü",), -math.inf)]


@pytest.mark.parametrize(("sizes", "scale"), VALUES)
def test_a_new_family_needs_nothing_but_its_classes(sizes, scale):
    for part in (FutureBias(-3), FuturePart(2), kl.Abs()):
        made = FutureFamily(sizes, scale, part)
        assert from_text(to_text(made)) == made


def test_subclasses_of_numbers_and_strings_are_written_as_what_they_are():
    found = from_text(to_text(FutureFamily((np.str_("x"),), np.float64(0.1))))
    assert (type(found.scale), type(found.sizes[0])) == (float, str)
    assert found == FutureFamily(("x",), 0.1)


def test_a_nan_comes_back():
    assert math.isnan(from_text(to_text(FutureFamily(scale=math.nan))).scale)


REFUSED = {
    "nothing": ("", "is not the text of a descriptor"),
    "no grammar": ("Pairwise(", "is not the text of a descriptor"),
    "null": ("Pairwise(\0)", "is not the text of a descriptor"),
    "a number": ("3", "is the text of 3, which is no descriptor"),
    "a part": ("Laplace()", "which is no descriptor"),
    "unknown type": ("Pairwize()", "'Pairwize' is no type .* known are Abs, .*Pairwise"),
    "a base": ("Epilogue()", "'Epilogue' is no type"),
    "a function": ("laplace_l1()", "'laplace_l1' is no type"),
    "a builtin": ("print()", "'print' is no type"),
    "unknown field": ("Pairwise(inside=Abs())", "unexpected keyword argument 'inside'"),
    "private field": ("Pairwise(_hash=1)", "unexpected keyword argument '_hash'"),
    "bad value": ("Pairwise(operator='sum')", "operator must be one of .* got 'sum'"),
    "bad part": ("Pairwise(inner=Root())", "inner must be one of"),
    "bad expression": (
        "Pairwise(epilogue=(Custom(expression='open(v)', parameters=()),))",
        "calls 'open'",
    ),
    "position": ("Pairwise('dot')", "is not part of the grammar"),
    "starred": ("Pairwise(**())", "not name=value"),
    "twice": ("Pairwise(inner=Abs(), inner=Square())", "each once|repeated"),
    "attribute": ("kl.Pairwise()", "is not part of the grammar"),
    "call of a call": ("Pairwise()()", "is not part of the grammar"),
    "import": ("__import__('os')", "is not part of the grammar"),
    "lambda": ("Pairwise(inner=lambda: 1)", "is not part of the grammar"),
    "list": ("Pairwise(epilogue=[Laplace()])", "is not part of the grammar"),
    "sum": ("FutureFamily(scale=1 + 1)", "is not part of the grammar"),
    "ellipsis": ("FutureFamily(part=...)", "is not part of the grammar"),
    "complex": ("FutureFamily(scale=1j)", "is not part of the grammar"),
    "bytes": ("FutureFamily(part=b'x')", "is not part of the grammar"),
    "minus a string": ("FutureFamily(part=-'x')", "bad operand"),
    "deep": (
        "FutureFamily(part=" + 201 * "(" + 201 * ")" + ")",
        "is not the text of a descriptor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_text_of_a_descriptor_is_a_value_error(case):
    text, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_text(text)


def test_errors_quote_little_of_a_long_text():
    with pytest.raises(ValueError) as caught:
        from_text("Pairwise(" + 10_000 * "x" + ")")
    assert len(str(caught.value)) < 1000


def test_two_types_of_one_name_are_refused():
    twin = dataclasses.make_dataclass("FutureBias", [], bases=(epilogues.Epilogue,), frozen=True)
    twin.__module__ = "elsewhere"
    text = to_text(FutureFamily(part=FutureBias(7)))
    with pytest.raises(ValueError, match="'FutureBias' is the name of several types"):
        from_text(text)
    del twin
    gc.collect()


def test_a_class_that_is_defined_anew_is_the_one_that_is_meant():
    for formula in ("v * 2", "v * 3"):

        @dataclasses.dataclass(frozen=True, slots=True)
        class Redefined(epilogues.Epilogue):
            @property
            def expression(self, text=formula):
                return text

        made = kl.Pairwise(epilogue=Redefined())
        assert from_text(to_text(made)) == made
        assert from_text(made.text).epilogue[0].expression == formula


@pytest.mark.parametrize("value", ["Pairwise()", kl.Pairwise, None, 3, kl.Laplace()])
def test_only_descriptors_have_a_text(value):
    with pytest.raises(TypeError, match="must be a kernlib descriptor"):
        to_text(value)


def test_a_field_without_a_text_is_refused():
    with pytest.raises(TypeError, match="holds what has no text"):
        to_text(FutureFamily(part=frozenset()))
