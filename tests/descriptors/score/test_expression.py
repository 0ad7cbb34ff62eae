"""What descriptors of attention hold: a score, a mask, and the tensors that these read."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
from hypothesis import given

from kernlib.descriptors.base import Descriptor, render
from kernlib.descriptors.score.expression import RESERVED, ScoreExpression
from kernlib.descriptors.text import from_text, to_text
from tests.support.scores import MASK, SCORE, dtypes_of, expression_of

PAIR = ("head", "row", "col")


@dataclass(frozen=True, slots=True, repr=False)
class HoldsScore(Descriptor):
    """As a descriptor of attention holds one."""

    family: ClassVar[str] = "none"
    expression: ScoreExpression


def test_a_dict_is_pairs():
    made = ScoreExpression("v + bias", "document == row", {"bias": PAIR, "document": ["row"]})
    assert made.captured == (("bias", PAIR), ("document", ("row",)))
    assert made.names == ("bias", "document")
    assert made == ScoreExpression(made.score, made.mask, made.captured)
    assert made == ScoreExpression(made.score, made.mask, {"bias": PAIR, "document": "row"})
    assert hash(made) == hash(copy.deepcopy(made)) == hash(pickle.loads(pickle.dumps(made)))


@given(score=SCORE, mask=MASK)
def test_text_and_back(score, mask):
    held = HoldsScore(expression_of(score, mask))
    assert from_text(to_text(held)) == held
    assert score in render(held) or "\\" in render(held)


def test_kinds_decide_when_there_are_dtypes():
    made = ScoreExpression("where(flag, v, 0)", None, {"flag": ("row",)})
    assert made.trees(("bool",)).score.operator == "where"
    with pytest.raises(ValueError, match="'flag' is a whole number, not a condition"):
        made.trees(("int32",))
    with pytest.raises(TypeError, match=r"flag must be of float64, float32, .*, got int8"):
        made.trees(("int8",))


def test_whole_numbers_and_conditions_have_no_derivative():
    made = ScoreExpression(
        "v * gain + document", "flag and other > 1",
        {"gain": (), "document": ("row",), "flag": ("col",), "other": ("row",)},
    )  # fmt: skip
    assert made.differentiable(("float32", "int64", "bool", "float32")) == ("gain",)
    assert made.differentiable(("int32", "float16", "bool", "int32")) == ("document",)
    assert ScoreExpression(None, "other > 1", {"other": ()}).differentiable(("float32",)) == ()


@given(score=SCORE)
def test_what_is_wrong_whatever_is_captured_is_found_without(score):
    """And nothing else is: each of these has a meaning for the dtypes that it is made for."""
    made = expression_of(score)
    assert made.trees(dtypes_of(made)).score is not None
    with pytest.raises(ValueError, match="not a number"):
        expression_of(f"{score} + (row < col)")


WRONG = {
    "text": ((1,), TypeError, "score must be a string or None, got 1"),
    "mask": ((None, True), TypeError, "mask must be a string or None, got True"),
    "function": ((None, min), TypeError, "got the function min; one is 'col <= row', and tensors"),
    "pairs": (("v", None, "bias"), TypeError, "captured must be a dict such as"),
    "pair": (("v", None, ("bias",)), TypeError, "captured must be a dict .*got 'bias' in it"),
    "axes": (("v+x", None, {"x": 1}), TypeError, "axes of captured x must be a tuple of"),
    "axis": (("v+x", None, {"x": ("key",)}), ValueError, "must be of .*'col'.*, got 'key'"),
    "text of axes": (("v+x", None, {"x": "row, col"}), ValueError, "'row, col'; several are a tup"),
    "twice": (("v+x", None, {"x": ("row", "row")}), ValueError, "axes of captured x repeat one"),
    "name": (("v", None, {"1x": ()}), ValueError, "captured '1x' is not an ASCII identifier"),
    "taken": (("v", None, {"seed": ()}), ValueError, "captured name 'seed' is taken"),
    "keyword": (("v", None, {"if": ()}), ValueError, "captured name 'if' is taken"),
    "again": (("v+x", None, (("x", ()), ("x", ()))), ValueError, "captured repeats a name"),
    "unused": (("v", "row<3", {"x": ()}), ValueError, r"neither score nor mask reads.*\['x'\]$"),
    "argument": (("v", None, {"is_causal": ()}), ValueError, r"'\]; did you mean causal\?"),
    "unknown": (("v + y", None), ValueError, "'y' is not known to a score"),
    "condition": (("v < 1", None), ValueError, "'v < 1' is a condition, not a number"),
    "number": ((None, "row"), ValueError, "'row' is a whole number, not a condition"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case):
    arguments, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        ScoreExpression(*arguments)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_no_tensor_has_a_name_that_is_taken(name):
    with pytest.raises(ValueError, match="is taken"):
        ScoreExpression("v", None, {name: ()})
