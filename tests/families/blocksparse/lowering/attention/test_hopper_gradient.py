"""Gradients of attention by wgmma and tensor maps, run by threads of the host, against those of its
formula in float64; and what NVRTC makes of them."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention.base import Scope
from kernlib.families.blocksparse.kernels.attention.gradient import hopper
from kernlib.families.blocksparse.lowering.attention.problem import Operand, Score
from tests.families.blocksparse.lowering.attention.cases import Case, error, launches_of
from tests.families.blocksparse.lowering.attention.gradients import GATES, HOPPER, Gradients
from tests.families.blocksparse.lowering.attention.scores import with_least
from tests.families.blocksparse.lowering.attention.wgmma import WGMMA_CASES
from tests.families.blocksparse.products import launch
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

ARCH = hopper.ARCH

# Softcap and a bias by position, as generated text has them.
SCORE = """struct CappedScore : PlainScore {
    using PlainScore::PlainScore;
    __device__ float operator()(float v, int row, int col) const {
        return 2.0f * tanhf(v / 2.0f) - 0.05f * float(row - col);
    }
    __device__ float slope(float v, int row, int col) const {
        float t = tanhf(v / 2.0f);
        return 1.0f - t * t;
    }
    __device__ bool keeps(int row, int col) const { return (row + col) % 3 != 0; }
};
using Score = CappedScore;
"""


def capped(v, row, col, *_):
    return 2.0 * torch.tanh(v / 2.0) - 0.05 * (row - col)


def thirds(row, col, *_):
    return (row + col) % 3 != 0


SCORED = {"text": SCORE, "score": capped}
CASES = {n: case for n, case in WGMMA_CASES.items() if case.features <= 128} | {
    "dropout of 128 features": Case(
        features=128, values=128, heads=1, kv_heads=1, density=0.8, dropout=0.3
    ),
    "score": Case(density=0.7, queries=90, **SCORED),
    "score of 128 features": Case(
        features=128, values=128, heads=1, kv_heads=1, block=(64, 64), **SCORED
    ),
    "mask": Case(density=0.7, keys=90, text=SCORE, mask=thirds),
    "all at once": WGMMA_CASES["all at once"]._replace(mask=thirds, **SCORED),
}
FAST = ("16", "64", "lengths", "all at once", "dropout of 128 features")


def run(made: Gradients, emulator, choice=None, needs=(True, True, True)) -> None:
    made.run(partial(launch, emulator), choice, needs, kernel=HOPPER)


def check(made: Gradients, needs=(True, True, True)) -> None:
    gate = 3 * GATES[made.made.case.numbers]
    for found, wanted, need in zip(made.results, made.wanted(), needs, strict=True):
        assert not need or error(found, wanted) <= gate


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_gradients(name, emulator, seed):
    made = Gradients(CASES[name])
    run(made, emulator)
    check(made)


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("lengths",), CASES))
def test_gradients_of_tiles_that_are_not_the_default(name, emulator, seed):
    made = Gradients(CASES[name])
    default = HOPPER.default(made.problem(), None)
    (other,) = (choice for choice in HOPPER.choices(None, ARCH) if choice != default)
    run(made, emulator, other)
    check(made)


@pytest.mark.emulated
def test_rows_of_the_least_float_have_gradients_of_weights_of_one_size(emulator, seed):
    """By what a kernel of the result says of them."""
    case, given = with_least(Case("bfloat16", (32, 64), 75, 141, batch=2, density=0.6))
    made = Gradients(case, given)
    made.made.run(emulator)
    run(made, emulator)
    check(made)


@pytest.mark.emulated
def test_what_is_not_needed_is_not_written(emulator, seed):
    made = Gradients(Case(density=0.6))
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        run(made, emulator, needs=needs)
        check(made, needs)


@pytest.mark.few(1)
@pytest.mark.emulated
def test_of_the_log_sum_exp_too(emulator, seed):
    made = Gradients(Case("float16", density=0.5, layout="head"), grad_lse=True)
    run(made, emulator)
    check(made)


@pytest.mark.emulated
def test_nothing_behind_the_lengths_is_read(emulator, seed):
    """NaN there, in all operands, spoils nothing; gradients there are 0."""
    case = Case(queries=90, keys=110, batch=2, lengths=True, density=1.0, window=(50, 60))
    made = Gradients(case)
    given, wanted = made.made, made.wanted()
    for b in range(case.batch):
        for t, length in (
            *((t, given.q_lengths[b]) for t in (given.q, given.grad)),
            *((t, given.kv_lengths[b]) for t in (given.k, given.v)),
        ):
            t[b, :, length:] = math.nan
    run(made, emulator)
    for found, other in zip(made.results, wanted, strict=True):
        assert error(found, other) <= 3 * GATES[case.numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
def test_a_row_of_nan_spoils_no_other_row_of_dq(emulator, seed):
    made = Gradients(Case(queries=70, density=1.0))
    wanted = made.wanted()[0]
    made.made.grad[:, :, 5] = math.nan
    run(made, emulator)
    assert made.dq[:, :, 5].isnan().all()
    others = [row for row in range(70) if row != 5]
    assert error(made.dq[:, :, others], wanted[:, :, others]) <= 3 * GATES["float16"]


# What is taken, and what NVRTC makes of it.


def test_what_is_left_to_other_kernels():
    problem = Gradients(Case()).problem()
    of = problem.attention
    assert HOPPER.takes(problem, ARCH)
    assert not HOPPER.takes(problem, "sm_90")
    others = (
        of._replace(dtype="float32"),
        of._replace(values=64),
        of._replace(features=136, values=136),
        of._replace(keys=0),
        of._replace(q=Operand(4096, 512, 36)),
        of._replace(k=Operand(4096, 512, 32, 8)),
    )
    for other in others:
        assert not HOPPER.takes(problem._replace(attention=other), ARCH)
    assert not HOPPER.takes(problem._replace(grad=Operand(0, 0, 0)), ARCH)


def test_variants_are_what_is_lowered():
    for case in (
        Case(),
        Case(features=128, values=128, block=(64, 128)),
        Case(features=72, values=72),
    ):
        problem = Gradients(case).problem()
        of = problem.attention
        scope = Scope(of.blocks[:2], (of.dtype,), ARCH)
        listed = HOPPER.specs(
            of.score, scope._replace(features=case.features, values=case.values), ARCH
        )
        assert set(launches_of(HOPPER, problem, None, ARCH).specs) <= set(listed)
        assert set(listed) <= set(HOPPER.specs(of.score, scope, ARCH))


SCORES = {
    "plain": Score(),
    "causal": Score(causal=True),
    "window, lengths": Score(window=True, lengths=True),
    "dropout": Score(dropout=True),
    "score": Score(text=SCORE, has_score=True, has_mask=True),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("features", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_products_overlap_and_nothing_spills(name, features):
    for block, turned, rows in product(((128, 128), (16, 16)), (False, True), (128, 64)):
        made = hopper.variant_of(SCORES[name], "bfloat16", block, features, turned, rows)
        found = compiled(HOPPER.spec(SCORES[name], made), ARCH)
        # Of two results of one warpgroup the gathering producer has 24 registers.
        spilled = 64 if made.early and rows == 64 else 0
        assert not found.serialized and found.spilled <= spilled
