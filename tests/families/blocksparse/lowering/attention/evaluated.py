"""A kernel that evaluates scores and masks everywhere, what it is given, and what torch makes of
the same."""

from __future__ import annotations

import re
import struct

import torch

from kernlib.descriptors.derivative import derivative
from kernlib.descriptors.expression import POSITIONS
from kernlib.families.blocksparse.lowering.attention import score_source
from kernlib.families.blocksparse.lowering.attention.score_struct import SMALLEST, score_of
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import expressions
from tests.support.scores import BATCH, COLS, HEADS, ROWS, dtypes_of, values_of

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


def made_of(expression):
    dtypes = dtypes_of(expression)
    by = ("v", *expression.differentiable(dtypes))
    return score_of(expression, dtypes, by, [x for x in PACKED if x in expression.names])


def spec_of(scores):
    """A kernel that evaluates each, in a namespace of its own."""
    includes = (*score_source.INCLUDES, "blocksparse/attention/elements.cuh")
    lines = [*(f'#include "{name}"' for name in ("common/types.cuh", *includes)), EVALUATE]
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


NAMED = {
    "softcap": "gain * tanh(v / gain)",
    "relative": "v * 0.5 + bias",
    "alibi": "v - slope * abs(row - col)",
    "sink": "where(col == 0, shift, v)",
    "left out": "where(row < col, -inf, v)",
    "infinite": "v * -inf + where(v > 0, inf * v, inf - inf) * gain",
    "powers": "v ** 3 + gain ** 2 - abs(v) ** shift ** 2",
    "positions": "v + head * batch * 0.5 - (row * col) * 2 ** -head",
    "conditional": "v if flag and not wanted else v / (1 + gain * gain)",
    "wide": "v + document * topic * 3000000000",
    "least": "v + (document - 9223372036854775807 - 1) * (topic - 2147483648) % 7",
    "rests": "v + (row - col) % 3 * 9 + (row - col) // 3 + (col - row) % -3 * 99 + col // -2",
    "cells": "v + floor(41 * (row + 1) / 41) * 9 + floor(41 / (col + 41)) + sign(1 - 41 / 41.0)",
    "borders": "where(41 * (col + 1) / (gain / gain * 41) >= col + 1, v, -inf)",
    "by zero": "v + document // topic + document % topic + row // -1",
}


EVERYTHING = (
    "where((row + col) % 3 == head, v ** 3 + expm1(-abs(v)) * bias, min(v, shift) / slope)"
    " + floor(v) * sign(v - gain) + erf(v) - ndtr(v) + clamp(v, -1, 1) + topic // (1 + document)"
    " + max(row, topic) + min(row, col) * abs(row - col) + mod(topic, 3) + sign(col - 2)"
    " + v ** gain + where(flag or not wanted, -inf, log1p(abs(v))) + document * topic"
)
