"""Random scores and masks, as text, and what they read."""

from __future__ import annotations

import re

import torch
from hypothesis import strategies as st

from kernlib.descriptors.expression import POSITIONS
from kernlib.descriptors.score.expression import ScoreExpression

BATCH, HEADS, ROWS, COLS = 2, 2, 3, 5
SIZES = {"batch": BATCH, "head": HEADS, "row": ROWS, "col": COLS}
# Captured tensors that a text may name, with their axes and dtypes.
CAPTURED = {
    "bias": (("head", "row", "col"), "float32"),
    "slope": (("head",), "bfloat16"),
    "gain": ((), "float32"),
    "shift": (("batch", "col"), "float16"),
    "document": (("batch", "row"), "int32"),
    "topic": (("col",), "int64"),
    "flag": (("batch", "col"), "bool"),
    "wanted": (("head",), "bool"),
}
TAME = ("cos", "erf", "sin", "tanh")  # defined everywhere and never large


def expression_of(score: str | None, mask: str | None = None) -> ScoreExpression:
    """With the captured tensors that are named, in the order of CAPTURED."""
    used = set(re.findall(r"\w+", f"{score} {mask}"))
    axes = {name: axes for name, (axes, _) in CAPTURED.items() if name in used}
    return ScoreExpression(score, mask, axes)


def dtypes_of(expression: ScoreExpression) -> tuple[str, ...]:
    return tuple(CAPTURED[name][1] for name in expression.names)


def captured() -> dict[str, torch.Tensor]:
    """All of them, whole numbers from a small range so that some are equal."""
    found = {}
    for name, (axes, dtype) in CAPTURED.items():
        shape, kind = [SIZES[axis] for axis in axes], getattr(torch, dtype)
        if kind.is_floating_point:
            found[name] = (torch.randn(shape) + 0.25).to(kind)
        else:
            found[name] = torch.randint(0, 4, shape).to(kind)
    return found


def positions(batch: int = BATCH, heads: int = HEADS, rows: int = ROWS, cols: int = COLS) -> dict:
    """Whole numbers that broadcast to logits (batch, heads, rows, columns)."""
    sizes = zip(POSITIONS, (batch, heads, rows, cols), strict=True)
    return {name: placed(torch.arange(size), (name,)) for name, size in sizes}


def placed(tensor: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """A captured tensor as a view (batch, heads, rows, columns), of size 1 along axes that it does
    not have."""
    order = sorted(range(len(axes)), key=lambda at: POSITIONS.index(axes[at]))
    missing = [at for at, axis in enumerate(POSITIONS) if axis not in axes]
    tensor = tensor.permute(order)
    for at in missing:
        tensor = tensor.unsqueeze(at)
    return tensor


def values_of(expression: ScoreExpression, tensors: dict[str, torch.Tensor]) -> dict:
    """What the references are given: positions and captured tensors."""
    return positions() | {name: placed(tensors[name], axes) for name, axes in expression.captured}


def _text(form: str, *parts: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(*parts).map(lambda found: form.format(*found))


_POSITIVE, _NUMBER = st.integers(1, 7).map(str), st.integers(-9, 9).map(str)
_DIVISOR = st.sampled_from(["1", "2", "3", "5", "-1", "-3", "(head + 1)", "(1 + abs(row - col))"])


def _larger_whole(parts):
    return st.one_of(
        _text("({} {} {})", parts, st.sampled_from("+-"), parts),
        _text("({} * {})", parts, _POSITIVE),
        _text("({} {} {})", parts, st.sampled_from(["//", "%"]), _DIVISOR),
        _text("mod({}, {})", parts, _DIVISOR),
        _text("{}({})", st.sampled_from(["-", "abs", "sign"]), parts),
        _text("{}({}, {})", st.sampled_from(["max", "min"]), parts, parts),
        _text("clamp({}, {}, {})", parts, _NUMBER, parts),
    )


_POSITIONS = st.sampled_from(["row", "col", "head", "batch", "document", "topic"])
WHOLE = st.recursive(_POSITIONS | _POSITIONS | _NUMBER, _larger_whole, max_leaves=5)

_PLAIN_LEAVES = st.sampled_from(["v", "bias", "slope", "gain", "shift", "0.5", "2", "1.25"])
# Numbers that every arithmetic rounds alike, so that comparisons of them agree.
PLAIN = st.recursive(
    _PLAIN_LEAVES, lambda parts: _text("({} {} {})", parts, st.sampled_from("+-*"), parts),
    max_leaves=3,
)  # fmt: skip


def _larger_condition(parts):
    return st.one_of(
        _text("({} {} {})", parts, st.sampled_from(["and", "or", "&", "|"]), parts),
        _text("({} and {} and {})", parts, parts, parts),
        _text("(not {})", parts),
        _text("({} {} {})", parts, st.sampled_from(["==", "!="]), parts),
        _text("where({}, {}, {})", parts, parts, parts),
    )


_SIGNS = st.sampled_from(["<", "<=", "==", "!=", ">", ">="])
_CONDITIONS = st.one_of(
    _text("({} {} {})", WHOLE, _SIGNS, WHOLE),
    _text("({} {} {} {} {})", WHOLE, _SIGNS, WHOLE, _SIGNS, WHOLE),
    _text("({} {} {})", PLAIN, _SIGNS, PLAIN | WHOLE),
    st.sampled_from(["flag", "wanted"]),
)
CONDITION = st.recursive(_CONDITIONS, _larger_condition, max_leaves=4)
MASK = CONDITION.filter(lambda text: not re.search(r"\bv\b", text))


def _larger_number(parts):
    either = parts | parts | WHOLE
    return st.one_of(
        _text("({} {} {})", parts, st.sampled_from("+-*"), either),
        _text("({} {} {})", WHOLE, st.sampled_from("+-*/"), _text("(2 + abs({}))", parts)),
        _text("({} / (1 + abs({})))", parts, parts),
        _text("({} / gain)", parts),
        _text("sin({}) ** {}", parts, st.sampled_from("0123")),
        _text("(-{})", parts),
        _text("{}({})", st.sampled_from(TAME), either),
        _text("{}({}, {})", st.sampled_from(["max", "min"]), parts, either),
        _text("clamp({}, -2, {})", parts, _POSITIVE),
        _text("sqrt(abs({}))", either),
        _text("log1p(abs({}))", parts),
        _text("where({}, {}, {})", CONDITION, parts, either),
        _text("({} if {} else {})", parts, CONDITION, either),
        _text("floor({})", PLAIN),
        _text("sign({})", PLAIN),
    )


SCORE = st.recursive(_PLAIN_LEAVES | st.just("v"), _larger_number, max_leaves=8)
