"""Scores and masks in torch, against Python's own value of the same text, and their gradients
against the rules of derivatives."""

import math
import statistics
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings

from kernlib.descriptors.derivative import derivative
from kernlib.descriptors.expression import POSITIONS, names
from kernlib.descriptors.score.expression import ScoreExpression
from kernlib.runtime import expressions
from tests.support.scores import (
    BATCH,
    CAPTURED,
    COLS,
    HEADS,
    MASK,
    ROWS,
    SCORE,
    captured,
    dtypes_of,
    expression_of,
    placed,
    positions,
    values_of,
)

DOUBLE = torch.float64
SHAPE = (BATCH, HEADS, ROWS, COLS)
PYTHON = {
    "abs": abs, "cos": math.cos, "erf": math.erf, "log1p": math.log1p, "max": max, "min": min,
    "ndtr": statistics.NormalDist().cdf, "sin": math.sin, "sqrt": math.sqrt, "tanh": math.tanh,
    "where": lambda c, a, b: a if c else b, "clamp": lambda x, a, b: min(max(x, a), b),
    "mod": lambda x, y: x % y, "floor": math.floor, "sign": lambda x: (x > 0) - (x < 0),
    "inf": math.inf,
}  # fmt: skip


def by_python(text, v, tensors):
    found = torch.empty(SHAPE, dtype=DOUBLE)
    code = compile(text, "score", "eval")
    for at in product(*map(range, SHAPE)):
        place = dict(zip(POSITIONS, at, strict=True))
        known = PYTHON | place | {"v": v[at].item()}
        for name, (axes, _) in CAPTURED.items():
            known[name] = tensors[name][tuple(place[axis] for axis in axes)].item()
        found[at] = float(eval(code, {"__builtins__": {}}, known))
    return found


def score_of(text, v, values=None):
    """Of a score that captures nothing, or what ``values`` has."""
    made = ScoreExpression(text, None, {name: () for name in values or {}})
    tree = made.trees(tuple(str(x.dtype).removeprefix("torch.") for x in (values or {}).values()))
    return expressions.score(tree.score, v, positions(1, 1, 1, v.shape[-1]) | (values or {}))


@settings(max_examples=60)
@given(text=SCORE)
def test_a_score_is_pythons(text):
    torch.manual_seed(0)
    v, tensors, made = torch.randn(SHAPE, dtype=DOUBLE), captured(), expression_of(text)
    found = expressions.score(made.trees(dtypes_of(made)).score, v, values_of(made, tensors))
    assert found.shape == SHAPE and found.dtype == DOUBLE
    torch.testing.assert_close(found, by_python(text, v, tensors), rtol=1e-7, atol=1e-9)


@settings(max_examples=60)
@given(text=MASK)
def test_a_mask_is_pythons(text):
    torch.manual_seed(0)
    tensors, made = captured(), expression_of(None, text)
    found = expressions.mask(made.trees(dtypes_of(made)).mask, values_of(made, tensors), DOUBLE)
    wanted = by_python(text, torch.zeros(SHAPE), tensors)
    assert found.dtype == torch.bool and found.expand(SHAPE).equal(wanted.bool())


@settings(max_examples=60)
@given(text=SCORE)
def test_gradients_are_the_rules(text):
    """Of each captured tensor the sum over what it is the same for."""
    torch.manual_seed(0)
    made = expression_of(text)
    dtypes = dtypes_of(made)
    tree, tensors = made.trees(dtypes).score, captured()
    leaves = {"v": torch.randn(SHAPE, dtype=DOUBLE)}
    leaves |= {name: tensors[name].double() for name in made.differentiable(dtypes)}
    for leaf in leaves.values():
        leaf.requires_grad_()
    values, grad = values_of(made, tensors | leaves), torch.randn(SHAPE, dtype=DOUBLE)
    value = expressions.score(tree, leaves["v"], values)
    assume(value.isfinite().all())
    for name in sorted(names(tree) & leaves.keys()):
        wanted = None
        if value.requires_grad:
            wanted = torch.autograd.grad(
                value, leaves[name], grad, retain_graph=True, allow_unused=True
            )[0]
        wanted = torch.zeros_like(leaves[name]) if wanted is None else wanted
        with torch.no_grad():
            slope = expressions.score(derivative(tree, name, 1e-300), leaves["v"], values)
            axes = POSITIONS if name == "v" else CAPTURED[name][0]
            across = [at for at, axis in enumerate(POSITIONS) if axis not in axes]
            found = (grad * slope).sum(across) if across else grad * slope
        if wanted.isfinite().all():
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_whole_numbers_are_exact():
    """Where float32 has one value for two of them."""
    document = torch.tensor([2**24, 2**24 + 1])
    axes = {"document": ("row",), "topic": ("col",)}
    made = ScoreExpression(None, "document == topic", axes)
    for dtype in (torch.int32, torch.int64):
        own = {name: placed(document.to(dtype), axes[name]) for name in axes}
        tree = made.trees((str(dtype).removeprefix("torch."),) * 2).mask
        found = expressions.mask(tree, positions(1, 1, 2, 2) | own, torch.float32)
        assert found[0, 0].tolist() == [[True, False], [False, True]]


EDGES = {  # of x and y
    "x // y": ([-7, -7, 7, -7], [2, 0, 2, 3], [-4, 0, 3, -3]),
    "x % y": ([-7, -7, 7, 7], [2, 0, 2, -3], [1, 0, 1, -2]),
    "mod(x, y)": ([-7, 7], [-3, -7], [-1, 0]),
    "x // -1 + y": ([-7, 7, -(2**31)], [0, 0, 0], [7, -7, 2**31]),
    "abs(x) - y": ([-(2**31)], [0], [2**31]),
    "x * y": ([2**30], [2**31], [2**61]),
}


@pytest.mark.parametrize("text", EDGES)
def test_quotients_are_floored_and_by_zero_are_zero(text):
    x, y, wanted = EDGES[text]
    values = {"x": torch.tensor(x, dtype=torch.int32), "y": torch.tensor(y)}
    found = score_of(text, torch.zeros(1, 1, 1, len(x), dtype=DOUBLE), values)
    assert found.flatten().tolist() == wanted


def test_what_is_not_selected_sends_no_gradient():
    """Where torch.where alone would send 0 times infinity."""
    v = torch.tensor([0.0, 2.0, -1.0], requires_grad=True)
    gain = torch.tensor(3.0, requires_grad=True)
    text = "where(v > 0, log(v) * gain, -inf)"
    found = score_of(text, v.reshape(1, 1, 1, 3), {"gain": gain}).flatten()
    assert found.tolist() == pytest.approx([-math.inf, 3 * math.log(2), -math.inf])
    found[1].backward()
    assert v.grad.tolist() == [0.0, 1.5, 0.0]
    assert gain.grad.item() == pytest.approx(math.log(2))


def test_gradients_have_gradients():
    v = torch.randn(1, 1, 1, 4, dtype=DOUBLE, requires_grad=True)
    cap = torch.tensor(1.5, dtype=DOUBLE, requires_grad=True)

    def capped(v, cap):
        return score_of("where(col < 2, cap * tanh(v / cap), v * v * cap)", v, {"cap": cap})

    assert torch.autograd.gradcheck(capped, (v, cap))
    assert torch.autograd.gradgradcheck(capped, (v, cap))


def test_the_sign_of_a_nan_is_one():
    v = torch.tensor([-2.0, 0.0, 5.0, math.nan]).reshape(1, 1, 1, 4)
    found = score_of("sign(v)", v).flatten().tolist()
    assert found[:3] == [-1, 0, 1] and math.isnan(found[3])


@pytest.mark.parametrize("text", ["{0} / v", "v / {0}", "v / ({0} + 0.0)"])
def test_a_number_over_itself_is_one(text):
    """By a reciprocal it is less for 41, 47, 55 and 61."""
    for number in range(1, 100):
        v = torch.full((1, 1, 1, 3), float(number))
        assert score_of(f"floor({text})".format(number), v).eq(1).all(), number


@pytest.mark.parametrize("text", ["1 / 3", "where(1 < 2, 1, 0.5)", "2 ** 3", "7", "inf", "7 // 3"])
def test_a_constant_is_as_large_as_the_logits(text):
    v = torch.zeros(1, 1, 1, 3)
    found = score_of(text, v)
    assert found.shape == v.shape and found.dtype == v.dtype


@pytest.mark.parametrize(
    "text", ["1 < 2", "not 1 > 2", "1 < 2 and 2 == 2", "where(1 < 2, 1, 0) == 1"]
)
def test_a_mask_may_be_constant(text):
    tree = ScoreExpression(None, text).trees(()).mask
    assert expressions.mask(tree, positions(), torch.float32).all()
