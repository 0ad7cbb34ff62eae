"""``struct Score`` of random scores and masks: run by threads of the host, beside the reference in
torch, and compiled by NVRTC."""

import ctypes
import re
import struct

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kernlib.descriptors.derivative import derivative
from kernlib.descriptors.expression import POSITIONS
from kernlib.descriptors.score.bounds import structure
from kernlib.descriptors.score.expression import ScoreExpression, Trees
from kernlib.families.blocksparse.lowering.attention import score_source
from kernlib.families.blocksparse.lowering.attention.problem import Score
from kernlib.families.blocksparse.lowering.attention.score_struct import SMALLEST, score_of
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import expressions
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import COMPILER, Emulator
from tests.support.scores import (
    BATCH,
    COLS,
    HEADS,
    MASK,
    ROWS,
    SCORE,
    captured,
    dtypes_of,
    expression_of,
    placed,
    values_of,
)
from tests.support.speeds import slow_but

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SHAPE = (BATCH, HEADS, ROWS, COLS)
MOST = 8  # captured tensors of a score
PACKED = ("bias", "shift")  # whose columns lie side by side

EVALUATE = f"""
struct Parameters {{
    const Captured* captured;  // {MOST} of each score
    const float* v;
    float* out;  // of each score: its value, its slope, its mask, and slopes by captured tensors
}};
constexpr int THREADS = 32;
template <class Score, int K = 0>
__device__ void slopes(const Score& score, float* to, float v, int row, int col) {{
    *to = score.template slope_of<K>(v, row, col);
    if constexpr (K + 1 < {MOST})
        slopes<Score, K + 1>(score, to + {BATCH * HEADS * ROWS * COLS}, v, row, col);
}}
template <class Score>
__device__ void evaluate(const Parameters& p, int index) {{
    constexpr int SIZE = {BATCH * HEADS * ROWS * COLS};
    float* out = p.out + index * {3 + MOST} * SIZE;
    for (int at = threadIdx.x; at < SIZE; at += THREADS) {{
        int row = at / {COLS} % {ROWS}, col = at % {COLS};
        Score score(p.captured + index * {MOST}, at / {HEADS * ROWS * COLS},
                    at / {ROWS * COLS} % {HEADS});
        out[at] = score(p.v[at], row, col);
        out[SIZE + at] = score.slope(p.v[at], row, col);
        out[2 * SIZE + at] = score.keeps(row, col);
        slopes(score, out + 3 * SIZE + at, p.v[at], row, col);
    }}
}}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("scores"))


def made_of(expression):
    dtypes = dtypes_of(expression)
    by = ("v", *expression.differentiable(dtypes))
    return score_of(expression, dtypes, by, [x for x in PACKED if x in expression.names])


def spec_of(scores):
    """A kernel that evaluates each, in a namespace of its own."""
    lines = [score_source.preamble("float16", Score())]
    lines += ['#include "blocksparse/attention/elements.cuh"', EVALUATE]
    for index, made in enumerate(scores):
        text = re.sub(r"^#include .*$", "", made.text or "using Score = PlainScore;", flags=re.M)
        lines.append(f"namespace score_{index} {{\n{text}}}")
    calls = [f"    evaluate<score_{index}::Score>(p, {index});\n" for index in range(len(scores))]
    lines += ['extern "C" __global__ void scores(const Parameters p) {', *calls, "}\n"]
    return KernelSpec("blocksparse", "\n".join(lines), "scores", 32)


def views_of(expression, tensors):
    """Addresses and strides, 0 along axes that a tensor has not."""
    found = b""
    for name, axes in expression.captured:
        steps = dict(zip(axes, tensors[name].stride(), strict=True))
        strides = (steps.get(axis, 0) for axis in POSITIONS)
        found += struct.pack("<Q4q", tensors[name].data_ptr(), *strides)
    return found.ljust(40 * MOST, b"\0")


def run(emulator, made, views, v):
    """Of each score value, slope, mask, and slopes by captured tensors."""
    out = torch.full((len(made), 3 + MOST, *SHAPE), -1.0)
    records = ctypes.create_string_buffer(b"".join(views))
    block = struct.pack("<3Q", ctypes.addressof(records), v.data_ptr(), out.data_ptr())
    memory = ctypes.create_string_buffer(block, len(block))
    emulator.launch(spec_of(made), (1, 1), ctypes.addressof(memory))
    return out


def check(found, expression, v, tensors):
    """Beside the reference in float32, and the rules of derivatives there."""
    dtypes = dtypes_of(expression)
    values, trees = values_of(expression, tensors), expression.trees(dtypes)
    mask = torch.ones(SHAPE)
    if trees.mask is not None:
        mask = expressions.mask(trees.mask, values, torch.float32).float().expand(SHAPE)
    assert found[2].equal(mask), expression
    wanted, slopes = v, {"v": torch.ones(SHAPE)}
    if trees.score is not None:
        wanted = expressions.score(trees.score, v, values)
        for name in ("v", *expression.differentiable(dtypes)):
            slope = derivative(trees.score, name, SMALLEST)
            slopes[name] = expressions.score(slope, v, values)
    close(found[0], wanted, expression)
    close(found[1], slopes["v"], expression)
    for index, name in enumerate(expression.names):
        close(found[3 + index], slopes.get(name, torch.zeros(SHAPE)), expression)


def close(found, wanted, expression):
    torch.testing.assert_close(
        found, wanted, rtol=2e-4, atol=2e-5, equal_nan=True,
        msg=lambda text: f"{expression}: {text}",
    )  # fmt: skip


PAIRS = st.tuples(st.none() | SCORE | SCORE, st.none() | MASK)


@needs_compiler
@pytest.mark.parametrize("examples", slow_but((3,), (3, 40)))  # of which the first is the simplest
def test_random_scores_are_the_references(examples, emulator):
    @settings(deadline=None, max_examples=examples, database=None, phases=(Phase.generate,))
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


NAMED = {
    "softcap": "gain * tanh(v / gain)",
    "relative": "v * 0.5 + bias",
    "alibi": "v - slope * abs(row - col)",
    "sink": "where(col == 0, shift, v)",
    "left out": "where(row < col, -inf, v)",
    "powers": "v ** 3 + gain ** 2 - abs(v) ** shift ** 2",
    "positions": "v + head * batch * 0.5 - (row * col) * 2 ** -head",
    "conditional": "v if flag and not wanted else v / (1 + gain * gain)",
    "wide": "v + document * topic * 3000000000",
    "least": "v + (document - 9223372036854775807 - 1) * (topic - 2147483648) % 7",
    "rests": "v + (row - col) % 3 * 9 + (row - col) // 3 + (col - row) % -3 * 99 + col // -2",
    "by zero": "v + document // topic + document % topic + row // -1",
}


@needs_compiler
def test_named_scores_are_the_references(emulator, seed):
    tensors, v = captured(), torch.randn(SHAPE)
    tensors["shift"] = (tensors["shift"].abs() + 1).clamp(max=2)
    known = [expression_of(text) for text in NAMED.values()]
    out = run(emulator, [made_of(x) for x in known], [views_of(x, tensors) for x in known], v)
    for expression, found in zip(known, out, strict=True):
        check(found, expression, v, tensors)


@needs_compiler
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


def test_flags_say_what_there_is():
    both = score_of(ScoreExpression("v * 2", "row < col"), ())
    assert (both.has_score, both.has_mask, both.captured) == (True, True, ())
    assert not score_of(ScoreExpression(None, "row < col"), ()).has_score
    assert not score_of(ScoreExpression("v * 2"), ()).has_mask


def test_a_window_may_be_taken_out_of_the_mask():
    made = ScoreExpression(None, "col <= row and row % 2 == 0")
    window = structure(made.trees(()).mask)
    text = score_of(made, (), trees=Trees(None, window.rest)).text
    keeps = text[text.index("keeps") :].partition("return ")[2].partition(";")[0]
    assert window.right == 0 and "row" in keeps and "col" not in keeps
    whole = structure(ScoreExpression(None, "col <= row").trees(()).mask)
    assert score_of(made, (), trees=Trees(None, whole.rest)) == Score()


def test_what_a_matrix_has_one_of_is_computed_once():
    made = expression_of("v * exp(slope * head) + sqrt(gain) / slope", "wanted and head < 2")
    text = score_of(made, dtypes_of(made), ("v", "slope", "gain")).text
    functions = text[text.index("operator()") :]
    for word in ("exp(", "sqrt(", "reciprocal(", "captured_value(", "head"):
        assert word in text and word not in functions, word


EVERYTHING = (
    "where((row + col) % 3 == head, v ** 3 + expm1(-abs(v)) * bias, min(v, shift) / slope)"
    " + floor(v) * sign(v - gain) + erf(v) - ndtr(v) + clamp(v, -1, 1) + topic // (1 + document)"
    " + max(row, topic) + min(row, col) * abs(row - col) + mod(topic, 3) + sign(col - 2)"
    " + v ** gain + where(flag or not wanted, -inf, log1p(abs(v))) + document * topic"
)


def test_everything_compiles():
    """Without a spill, and without a word but on flags that this kernel has no use for."""
    known = [expression_of(EVERYTHING), *map(expression_of, NAMED.values())]
    made = compiled(spec_of([made_of(each) for each in known]), "sm_90a")
    warnings = [line for line in made.log.splitlines() if "): warning" in line]
    assert made.spilled == 0
    assert not [line for line in warnings if "declared but never referenced" not in line]


TYPED = re.compile(
    r"(?:float|int|i64)\(-?[\d.e+-]+(?:ll)?\)|-9223372036854775807ll - 1|0\.0f|<\d>|\[\d\]|== \d|"
    r"\b[A-Za-z_]\w*"
)


@settings(deadline=None, max_examples=40)
@given(score=SCORE, mask=MASK)
def test_every_literal_has_a_type(score, mask):
    """No double among them, which would make doubles of all that they meet."""
    text = made_of(expression_of(score, mask)).text.partition("struct")[2]
    assert not re.search(r"\d", TYPED.sub("", text)), text
