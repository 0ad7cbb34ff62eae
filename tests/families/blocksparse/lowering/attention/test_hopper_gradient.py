"""Gradients of attention by wgmma and tensor maps, run by threads of the host, against those of its
formula in float64; and what NVRTC makes of them."""

import math
from itertools import product

import pytest
import torch

from kernlib.families.blocksparse.layout import NAMES
from kernlib.families.blocksparse.lowering.attention import hopper_gradient
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Operand,
    Score,
)
from tests.families.blocksparse.lowering.attention.cases import (
    GATES,
    Case,
    Made,
    error,
    guarded,
    is_intact,
    operand_of,
)
from tests.support.compiled_kernels import compiled
from tests.support.emulation import maps
from tests.support.emulation.emulator import Emulator, kernels_of

ARCH = hopper_gradient.ARCH

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
CASES = {
    "16": Case(density=0.3, layout="head", queries=80, keys=400),
    "64": Case("bfloat16", (64, 64), 300, 270, 64, 64, density=0.5, layout="head"),
    "32": Case("bfloat16", (32, 32), 130, 100, 48, 48),
    "128": Case(block=(128, 128), queries=150, keys=300, features=64, values=64, density=0.7),
    "128 features": Case(queries=70, keys=330, features=128, values=128, heads=1, kv_heads=1),
    "ragged": Case(queries=75, keys=141, layout="batch", batch=2, heads=2),
    "wide blocks": Case(block=(16, 128), queries=64, keys=300, density=0.5),
    "tall blocks": Case("bfloat16", (128, 32), 200, 128, 48, 48),
    "causal": Case(block=(32, 16), queries=100, keys=100, causal=True, density=0.8),
    "window": Case(block=(16, 32), queries=130, keys=130, window=(20, 9), density=0.9),
    "lengths": Case(queries=90, keys=110, batch=3, lengths=True, density=0.8, layout="batch"),
    "groups": Case(heads=6, kv_heads=2, layout="head"),
    "dropout": Case(density=0.8, dropout=0.3, layout="head"),
    "dropout of 128 features": Case(
        features=128, values=128, heads=1, kv_heads=1, density=0.8, dropout=0.3
    ),
    "score": Case(density=0.7, queries=90, **SCORED),
    "score of 128 features": Case(
        features=128, values=128, heads=1, kv_heads=1, block=(64, 64), **SCORED
    ),
    "mask": Case(density=0.7, keys=90, text=SCORE, mask=thirds),
    "all at once": Case(
        "bfloat16", (32, 32), 100, 120, 72, 72, 2, 4, 2, 0.7, "head", True, (40, 60), True, 0.2,
        text=SCORE, score=capped, mask=thirds,
    ),
    "one row": Case(queries=1, keys=200, batch=3, density=0.7, layout="batch"),
    "negative scale": Case(scale=-0.7),
    "nothing stored": Case(density=0.0),
}  # fmt: skip
FAST = ("16", "64", "lengths", "all at once", "dropout of 128 features")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


class Gradient:
    """Those of a case, its results in half precision made first, as a forward pass leaves them."""

    def __init__(self, case: Case, needs=(True, True, True), with_lse: bool = False):
        self.made, self.needs = Made(case), needs
        made, shape = self.made, (case.batch, case.kv_heads, case.keys)
        self.grad_lse = torch.randn(made.lse.shape) if with_lse else None
        self.dq = guarded(*made.q.shape, case.dtype)
        self.dk = guarded(*shape, case.features, case.dtype)
        self.dv = guarded(*shape, case.values, case.dtype)
        self.leaves = made.doubles()
        out, lse = made.dense(*self.leaves)
        self.lse = lse
        made.out.copy_(out.detach())
        made.lse.copy_(lse.detach())

    def problem(self) -> AttentionGradient:
        made = self.made
        others = (operand_of(t) for t in (made.grad, self.dq, self.dk, self.dv))
        return AttentionGradient(made.problem(), *others, self.needs, self.grad_lse is not None)

    def launch(self, emulator, choice=None) -> list:
        """dq, dk and dv, None for those that nobody needs."""
        made, problem = self.made, self.problem()
        assert hopper_gradient.takes(problem, ARCH)
        lowered = hopper_gradient.lower(problem, ARCH, 3, choice)
        known = {**dict(zip(NAMES, made.layout.tensors, strict=True)), **made.operands()}
        known |= {"dq": self.dq, "dk": self.dk, "dv": self.dv, "grad_lse": self.grad_lse}
        known["workspace"] = torch.full((lowered.workspace,), 255, dtype=torch.uint8)
        for name, need in zip(("dq", "dk", "dv"), self.needs, strict=True):
            known[name] = known[name] if need else None
        for step in lowered.steps:
            given = [(known[name], at) for name, at in step.pointers]
            addresses = [0 if t is None else t.data_ptr() + at for t, at in given]
            maps.launch(emulator, step, addresses, made.scalars)
        assert all(map(is_intact, (self.dq, self.dk, self.dv)))
        return [known[name] for name in ("dq", "dk", "dv")]

    def wanted(self) -> list[torch.Tensor]:
        made = self.made
        grads = [made.grad.double()]
        out, lse = made.dense(*self.leaves)
        outputs = [out]
        if self.grad_lse is not None:
            outputs.append(torch.where(lse.isfinite(), lse, 0.0))
            grads.append(self.grad_lse.double())
        return list(torch.autograd.grad(outputs, self.leaves, grads, allow_unused=True))


def compare(found, wanted, gate) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            assert error(one, other) <= gate


@pytest.mark.emulated
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES]
)
def test_gradients(name, emulator, seed):
    case = CASES[name]
    gradient = Gradient(case)
    compare(gradient.launch(emulator), gradient.wanted(), 3 * GATES[case.numbers])


@pytest.mark.emulated
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "lengths")) for n in CASES]
)
def test_gradients_of_tiles_that_are_not_the_default(name, emulator, seed):
    case = CASES[name]
    gradient = Gradient(case)
    default = hopper_gradient.default(gradient.problem(), hopper_gradient.candidates(None, ARCH), 3)
    (other,) = (c for c in hopper_gradient.candidates(None, ARCH) if c != default)
    compare(gradient.launch(emulator, other), gradient.wanted(), 3 * GATES[case.numbers])


@pytest.mark.emulated
def test_what_is_not_needed_is_not_written(emulator, seed):
    case = Case(density=0.6)
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        gradient = Gradient(case, needs)
        found = gradient.launch(emulator)
        assert [t is not None for t in found] == list(needs)
        compare(found, gradient.wanted(), 3 * GATES[case.numbers])


@pytest.mark.emulated
def test_of_the_log_sum_exp_too(emulator, seed):
    case = Case("float16", density=0.5, layout="head")
    gradient = Gradient(case, with_lse=True)
    compare(gradient.launch(emulator), gradient.wanted(), 3 * GATES[case.numbers])


@pytest.mark.emulated
def test_nothing_behind_the_lengths_is_read(emulator, seed):
    """NaN there, in all operands, spoils nothing; gradients there are 0."""
    case = Case(queries=90, keys=110, batch=2, lengths=True, density=1.0, window=(50, 60))
    gradient = Gradient(case)
    made, wanted = gradient.made, gradient.wanted()
    for b in range(case.batch):
        made.q[b, :, made.q_lengths[b] :] = math.nan
        made.grad[b, :, made.q_lengths[b] :] = math.nan
        made.k[b, :, made.kv_lengths[b] :] = math.nan
        made.v[b, :, made.kv_lengths[b] :] = math.nan
    compare(gradient.launch(emulator), wanted, 3 * GATES[case.numbers])


@pytest.mark.emulated
def test_a_row_of_nan_spoils_no_other_row_of_dq(emulator, seed):
    case = Case(queries=70, density=1.0)
    gradient = Gradient(case)
    wanted = gradient.wanted()[0]
    gradient.made.grad[:, :, 5] = math.nan
    found = gradient.launch(emulator)[0]
    assert found[:, :, 5].isnan().all()
    others = [row for row in range(70) if row != 5]
    compare([found[:, :, others]], [wanted[:, :, others]], 3 * GATES[case.numbers])


# What is taken, and what NVRTC makes of it.


def test_what_is_left_to_other_kernels():
    problem = Gradient(Case()).problem()
    of = problem.attention
    assert hopper_gradient.takes(problem, ARCH)
    assert not hopper_gradient.takes(problem, "sm_90")
    others = (
        of._replace(dtype="float32"),
        of._replace(values=64),
        of._replace(features=136, values=136),
        of._replace(keys=0),
        of._replace(q=Operand(4096, 512, 36)),
        of._replace(k=Operand(4096, 512, 32, 8)),
    )
    for other in others:
        assert not hopper_gradient.takes(problem._replace(attention=other), ARCH)
    assert not hopper_gradient.takes(problem._replace(grad=Operand(0, 0, 0)), ARCH)


def test_variants_are_what_is_lowered():
    for case in (
        Case(),
        Case(features=128, values=128, block=(64, 128)),
        Case(features=72, values=72),
    ):
        problem = Gradient(case).problem()
        lowered = hopper_gradient.lower(problem, ARCH, 132)
        known = {"features": case.features, "values": case.values}
        of = problem.attention
        listed = list(hopper_gradient.variants(of.score, of.blocks[:2], (of.dtype,), ARCH, **known))
        assert set(lowered.specs) <= set(listed)
        assert set(listed) <= set(
            hopper_gradient.variants(of.score, of.blocks[:2], (of.dtype,), ARCH)
        )


SCORES = {
    "plain": Score(),
    "causal": Score(causal=True),
    "window, lengths": Score(window=True, lengths=True),
    "dropout": Score(dropout=True),
    "score": Score(text=SCORE, has_score=True, has_mask=True),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("features", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_products_overlap_and_nothing_spills(name, features):
    for block, turned, rows in product(((128, 128), (16, 16)), (False, True), (128, 64)):
        made = hopper_gradient.variant_of(SCORES[name], "bfloat16", block, features, turned, rows)
        found = compiled(hopper_gradient.spec(SCORES[name], made), ARCH)
        # Of two results of one warpgroup the gathering producer has 24 registers.
        spilled = 64 if made.early and rows == 64 else 0
        assert not found.serialized and found.spilled <= spilled
