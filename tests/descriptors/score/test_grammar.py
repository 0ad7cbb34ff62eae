"""Texts of scores and masks: what is one, which kinds its parts are, what is said of others."""

import math

import pytest

from kernlib.descriptors.expression import Integer, Name, Number, Operation
from kernlib.descriptors.score.grammar import parse_mask, parse_score
from kernlib.descriptors.score.kinds import kind_of

KINDS = (
    ("bias", "float"), ("document", "int32"), ("topic", "int64"), ("flag", "bool"),
)  # fmt: skip
ROW, COL, V = Name("row"), Name("col"), Name("v")


def score(text):
    return parse_score(text, KINDS)


def mask(text):
    return parse_mask(text, KINDS)


def operators(node):
    if not isinstance(node, Operation):
        return []
    return [node.operator, *(each for operand in node.operands for each in operators(operand))]


def test_whole_numbers_become_numbers_where_they_meet_one():
    distance = Operation("-", (ROW, COL))
    assert score("v - row + col") == Operation(
        "+", (Operation("-", (V, Operation("float", (ROW,)))), Operation("float", (COL,)))
    )
    assert score("v + (row - col)") == Operation("+", (V, Operation("float", (distance,))))
    assert score("v + 2") == Operation("+", (V, Number(2.0)))
    assert score("row / 2").operands == (Operation("float", (ROW,)), Number(2.0))
    assert score("sin(row)") == Operation("sin", (Operation("float", (ROW,)),))
    assert score("row - col") == Operation("float", (distance,))
    assert score("7") == Number(7.0)


def test_whole_numbers_stay_what_they_are_among_their_like():
    assert mask("row - 2 <= col").operands == (Operation("-", (ROW, Integer(2, 32))), COL)
    assert mask("mod(row - col, 4) == 0") == mask("(row - col) % 4 == 0")
    assert mask("max(row, col) // 8 == abs(row - 5)").operator == "=="
    for text in ("clamp(row, 1, col) < 2", "sign(row - col) < 1", "floor(row) < 1", "-row < 3"):
        assert "float" not in operators(mask(text)), text
    assert mask("2 * 3 < row") == mask("6 < row")


WIDE = {
    "row + col": False, "row - col": False, "2 * row": False, "row * col": True, "3 * row": True,
    "row + 2 ** 31": None, "row + 2147483648": True, "abs(document)": True, "document + row": True,
    "document // 2": True, "row // 2": False, "row % document": True, "topic": True,
    "document": False, "max(row, topic)": True, "clamp(document, 0, row)": False,
    "where(flag, row, topic)": True, "where(flag, row, col)": False, "row * col % 4": True,
    "-document": True, "-row": False, "document % 5": False, "row % (col + 1)": False,
}  # fmt: skip


@pytest.mark.parametrize("text", WIDE)
def test_so_many_bits_as_hold_every_result(text):
    """Of 2**30 rows and columns at most; a number after all where a power is one."""
    tree = mask(f"({text}) == topic" if WIDE[text] else f"({text}) == document")
    kind = kind_of(tree.operands[0], {**dict(KINDS), "row": "int32", "col": "int32"})
    assert kind == {True: "int64", False: "int32", None: "float"}[WIDE[text]]


def test_conditions_are_pythons():
    assert mask("0 <= row - col < 3") == mask("0 <= row - col and row - col < 3")
    assert mask("(row < 1) & (col < 2) | flag") == mask("row < 1 and col < 2 or flag")
    assert mask("~flag") == mask("not flag")
    assert mask("flag ^ (row < 1)") == mask("flag != (row < 1)")
    assert score("v if flag else 0") == score("where(flag, v, 0)")
    assert mask("row < 1 if flag else col > 1").operator == "where"
    assert len(mask("flag and row < 1 and col < 2").operands) == 3


def test_minus_infinity_has_a_name():
    assert score("where(flag, v, -inf)").operands[2] == Operation("neg", (Number(math.inf),))


def test_many_conditions_side_by_side_are_not_nested():
    assert len(mask(" and ".join(["flag"] * 500)).operands) == 500


WRONG_SCORES = {
    "row == col": r"'row == col' is a condition, not a number; where\(row == col, 1, 0\) is one",
    "v + flag": r"'flag' is a condition, not a number; where\(flag, 1, 0\) is one",
    "where(row, v, 0)": "'row' is a whole number, not a condition; compare it, as in row != 0",
    "where(flag, v, flag)": "'flag' is a condition, not a number",
    "v % 2": r"'v' is a number with a fraction, and % takes whole numbers; of others floor",
    "bias // 2": "'bias' is a number with a fraction, and // takes whole numbers",
    "bias[head, row - col]": "has an index; a captured tensor is named without one",
    "torch.tanh(v)": "calls none of abs, .*; write tanh",
    "maximum(v, 0)": "write max",
    "relu(v)": r"calls none of abs, .*; write max\(x, 0\)",
    "torch.exp2(-head)": r"write 2 \*\* x",
    "frobnicate(v)": "calls none of abs",
    "tanh(x=v)": "names an argument of tanh",
    "where(flag, v)": r"takes 3 argument\(s\), not 2",
    "score + 1": "'score' is not known to a score; .*write v",
    "v + q_idx": "write row",
    "v + kv_idx": "write col",
    "v * h": r"write head\. A tensor is captured with its axes, as in \{'h': ",
    "v * bais": "did you mean bias",
    "v * V": r"did you mean v\? A tensor is captured",
    "v * w": "and inf. A tensor is captured",
    "v * window": "'window' is an argument of attention; give the tensor another name",
    "min(v, row, col)": r"takes 2 argument\(s\), not 3; nest them, as in min\(x, min\(y, z\)\)",
    "exp(v, row)": r"is no call of exp, which takes 1 argument\(s\), not 2$",
    "v * slope": r"captured with its axes, as in \{'slope': \('head', 'row', 'col'\)\}",
    "lambda: v": "is not part of the language; use numbers",
    "v @ v": "is not part of the language",
    "'v'": "is not part of the language",
    "v +": "score 'v .' does not parse",
    "1e999": "too large for a float64",
    "1" + "0" * 400: "too large for a float64",
    "v" + " + v" * 51: "score .* 51 operations in one another, of at most 50: use parentheses",
    "v ^ 2": "bind more tightly .*; a power is \\*\\*$",
    "v +\n bias": "score 'v .* does not parse: .*; several lines go into parentheses$",
    "~row": "compare it, as in row != 0; .* parentheses",
}
WRONG_MASKS = {
    "row": "'row' is a whole number, not a condition; compare it, as in row != 0",
    "bias": "compare it, as in bias != 0; floats that are added to logits are a score, v .+ bias",
    "v > 0": r"'v' is the logit, which a mask does not see; .*where\(condition, v, -inf\)",
    "row >= col & flag": "'col' is a whole number, .*bind more tightly than comparisons",
    "flag < 1": "'flag' is a condition, which has no order: < compares numbers",
    "1 == flag": "'1' is a whole number beside a condition",
    "not row": "'row' is a whole number, not a condition",
    "flag and topic": "'topic' is a whole number, not a condition",
    "row % 2.5 == 0": "'2.5' is a number with a fraction",
    "row < 3 && flag": "does not parse: .*; write and, or and not$",
    "!(row != 3)": "does not parse: .*; write and, or and not$",
    "row < ": "mask 'row < ' does not parse",
}


@pytest.mark.parametrize("text", WRONG_SCORES)
def test_what_is_no_score_is_quoted(text):
    with pytest.raises(ValueError, match=WRONG_SCORES[text]):
        score(text)


@pytest.mark.parametrize("text", WRONG_MASKS)
def test_what_is_no_mask_is_quoted(text):
    with pytest.raises(ValueError, match=WRONG_MASKS[text]):
        mask(text)
