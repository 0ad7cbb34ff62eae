"""``struct Score`` of random scores and masks: run by threads of the host, beside the reference in
torch, and compiled by NVRTC."""

import ctypes
import struct

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernlib.descriptors.score.bounds import structure
from kernlib.descriptors.score.expression import ScoreExpression, Trees
from kernlib.families.blocksparse.lowering.attention.problem import Score
from kernlib.families.blocksparse.lowering.attention.score_struct import score_of
from kernlib.runtime import expressions
from tests.families.blocksparse.lowering.attention.evaluated import (
    EVERYTHING,
    MOST,
    NAMED,
    SHAPE,
    check,
    close,
    made_of,
    spec_of,
    views_of,
)
from tests.support.compiled_kernels import compiled
from tests.support.scores import (
    BATCH,
    COLS,
    HEADS,
    MASK,
    ROWS,
    SCORE,
    captured,
    expression_of,
    placed,
    positions,
)
from tests.support.speeds import slow_but


def run(emulator, made, views, v):
    """Of each score value, slope, mask, and slopes by captured tensors."""
    out = torch.full((len(made), 3 + MOST, *SHAPE), -1.0)
    records = ctypes.create_string_buffer(b"".join(views))
    block = struct.pack("<3Q", ctypes.addressof(records), v.data_ptr(), out.data_ptr())
    memory = ctypes.create_string_buffer(block, len(block))
    emulator.launch(spec_of(made), (1, 1), ctypes.addressof(memory))
    return out


PAIRS = st.tuples(st.none() | SCORE | SCORE, st.none() | MASK)


@pytest.mark.emulated
@pytest.mark.parametrize("examples", slow_but((3,), (3, 40)))  # of which the first is the simplest
def test_random_scores_are_the_references(examples, emulator):
    @settings(max_examples=examples, database=None, phases=(Phase.generate,))
    @given(pairs=st.lists(PAIRS, min_size=16, max_size=16))
    def all_of_them(pairs):
        torch.manual_seed(0)
        tensors = captured()
        v = (torch.randn(SHAPE) * 16).round() / 16
        known = [expression_of(*pair) for pair in pairs]
        views = [views_of(each, tensors) for each in known]
        out = run(emulator, [made_of(each) for each in known], views, v)
        for expression, found in zip(known, out, strict=True):
            check(found, expression, v, tensors)

    all_of_them()


@pytest.mark.few(1)
@pytest.mark.emulated
def test_named_scores_are_the_references(emulator, seed):
    tensors, v = captured(), torch.randn(SHAPE)
    tensors["shift"] = (tensors["shift"].abs() + 1).clamp(max=2)
    known = [expression_of(text) for text in (*NAMED.values(), EVERYTHING)]
    out = run(emulator, [made_of(x) for x in known], [views_of(x, tensors) for x in known], v)
    for expression, found in zip(known, out, strict=True):
        check(found, expression, v, tensors)


@pytest.mark.few(1)
@pytest.mark.emulated
def test_tensors_of_any_strides_and_order_of_axes(emulator, seed):
    axes = {"x": ("col", "head", "row"), "y": ("row", "batch"), "z": ("col", "batch")}
    made = ScoreExpression("v * x + y * z", None, axes)
    tensors = {
        "x": torch.randn(COLS, ROWS, HEADS).mT,
        "y": torch.randn(1, BATCH).expand(ROWS, BATCH),
        "z": torch.randn(2 * COLS, BATCH)[::2],
    }
    dtypes = ("float32",) * 3
    score, v = score_of(made, dtypes, ("v", "x", "y", "z")), torch.randn(SHAPE)
    found = run(emulator, [score], [views_of(made, tensors)], v)[0]
    own = {name: placed(tensors[name], axes[name]) for name in axes}
    close(found[0], expressions.score(made.trees(dtypes).score, v, own), made)
    close(found[3], v, made)
    close(found[4], own["z"].expand(SHAPE), made)


def test_products_that_are_compared_are_not_part_of_a_multiply_add():
    """As those of NVRTC are by default: the diagonal would be left out."""
    made = ScoreExpression("v + 0.1 * row", "0.1 * row - 0.1 * col >= 0")
    assert score_of(made, ()).text.count("__fmul_rn(") == 2


def test_nothing_is_plain():
    assert score_of(ScoreExpression(), ()) == Score()


def test_names_are_no_part_of_the_text():
    one = ScoreExpression("v + bias * gain", None, {"bias": ("row", "col"), "gain": ()})
    other = ScoreExpression("v + x * y", None, {"x": ("row", "col"), "y": ()})
    dtypes = ("float16", "float32")
    assert score_of(one, dtypes) == score_of(other, dtypes)
    assert score_of(one, dtypes, ("v", "bias")) == score_of(other, dtypes, ("v", "x"))
    assert score_of(one, dtypes) != score_of(one, dtypes, ("v",))
    assert score_of(one, dtypes) != score_of(one, dtypes, packed=("bias",))


def test_a_window_may_be_taken_out_of_the_mask():
    made = ScoreExpression(None, "col <= row and row % 2 == 0")
    window = structure(made.trees(()).mask)
    text = score_of(made, (), trees=Trees(None, window.rest)).text
    keeps = text[text.index("keeps") :].partition("return ")[2].partition(";")[0]
    assert window.right == 0 and "row" in keeps and "col" not in keeps
    whole = structure(ScoreExpression(None, "col <= row").trees(()).mask)
    assert score_of(made, (), trees=Trees(None, whole.rest)) == Score()


NESTED = {  # 50 operations in one another
    "functions": "sin(" * 50 + "v" + ")" * 50,
    "products": "v" + " * v" * 50,
    "quotients": "v" + " / (1 + v)" * 49,
    "quotients of functions": "tanh(v / " * 25 + "2" + ")" * 25,
    "selections": "where(v > 1, " * 49 + "v" + ", 0)" * 49,
    "maxima": "max(1, " * 50 + "v" + ")" * 50,
    "powers": "v" + " ** v" * 50,
    "whole": "(" * 49 + "row" + " + 1)" * 49 + " * v",
    "conditions": "where(" + "not " * 48 + "(row < 1), v, 0)",
}


@pytest.mark.parametrize("kind", NESTED)
def test_whatever_is_permitted_has_a_text_and_a_derivative(kind):
    """With the frames of Python that a program of some depth leaves."""

    def all_of_it(deeper):
        if deeper:
            return all_of_it(deeper - 1)
        made = ScoreExpression(NESTED[kind])
        v = torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64, requires_grad=True)
        expressions.score(made.trees(()).score, v, positions(1, 1, 1, 2)).sum().backward()
        return score_of(made, (), ("v",)).has_score and v.grad.isfinite().all()

    assert all_of_it(200)


def test_everything_compiles():
    """Without a spill, and without a word but on flags that this kernel has no use for."""
    known = [expression_of(EVERYTHING), *map(expression_of, NAMED.values())]
    made = compiled(spec_of([made_of(each) for each in known]), "sm_90a")
    warnings = [line for line in made.log.splitlines() if "): warning" in line]
    assert made.spilled == 0
    assert not [line for line in warnings if "declared but never referenced" not in line]
