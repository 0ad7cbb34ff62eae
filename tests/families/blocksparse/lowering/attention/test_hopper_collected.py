"""Gradients by captured tensors beside those by wgmma, run by threads of the host, against those of
the formula in float64; and what NVRTC makes of them."""

from functools import partial
from itertools import product

import pytest
import torch

from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.plans import score_of
from kernlib.families.blocksparse.kernels.attention.gradient import hopper, portable
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Collected,
    View,
)
from tests.families.blocksparse.lowering.attention.cases import Case, Made, launches_of
from tests.families.blocksparse.lowering.attention.gradients import (
    HOPPER,
    Gradients,
    check_sums,
    soft_tensors,
    sums_of,
)
from tests.families.blocksparse.lowering.attention.scores import soft_bias
from tests.families.blocksparse.products import launch
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but


def run(made: Gradients, emulator, sums: dict, rows=128, needs=(True, True, True)) -> None:
    by_maps = partial(launch, emulator)
    made.run(by_maps, {"rows": rows}, needs, sums=sums, kernel=HOPPER)


CASE = Case(queries=75, keys=90, batch=2, heads=4, kv_heads=2, causal=True, density=0.8)
CASES = {
    "causal": CASE,
    "dropout": CASE._replace(dropout=0.25),
    "lengths": CASE._replace(lengths=True, window=(40, 20), block=(32, 16)),
    "odd": CASE._replace(keys=91, kv_heads=4, block=(16, 32)),
    "64": CASE._replace(numbers="bfloat16", block=(64, 64), causal=False, layout="head"),
    "128 features": CASE._replace(features=128, values=128, block=(32, 32), layout="batch"),
}


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("lengths",), CASES))
@pytest.mark.parametrize("rows", hopper.TILE_ROWS)
def test_every_axis(rows, name, emulator, seed):
    """By rows of all heads, columns of a head, pairs of a batch and head; a mask leaves some
    out."""
    case = CASES[name]
    given = soft_tensors(case)
    made = Gradients(soft_bias(case), given, grad_lse=True)
    sums = sums_of(case)
    run(made, emulator, sums, rows)
    made.check()
    check_sums(made, sums, given)


@pytest.mark.emulated
@pytest.mark.parametrize("over", slow_but(("batches",), ("batches", "heads", "both")))
def test_sums_over_batches_and_heads_have_a_launch_of_their_own(over, emulator, seed, monkeypatch):
    """In which blocks of threads share a line, of a window and of the rest of it."""
    monkeypatch.setattr(portable, "SHARE", 64)
    batch, heads = {"batches": (1, 4), "heads": (2, 1), "both": (1, 1)}[over]
    for case in (CASE, CASE._replace(keys=130, window=(30, 9), block=(32, 32))):
        given = soft_tensors(case, (batch, heads))
        made = Gradients(soft_bias(case), given)
        sums = sums_of(case, (batch, heads))
        run(made, emulator, sums)
        made.check()
        check_sums(made, sums, given)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.slow
def test_each_alone_has_the_same_bits(emulator, seed):
    """Of dq, dk and dv too, whatever is collected."""
    made = Gradients(soft_bias(CASE), soft_tensors(CASE))
    every = sums_of(CASE)
    run(made, emulator, every)
    whole = [t.clone() for t in made.results]
    for key, known in every.items():
        sums = {key: torch.zeros_like(known)}
        run(made, emulator, sums)
        assert sums[key].equal(known) and all(map(torch.equal, made.results, whole))
        alone = {key: torch.zeros_like(known)}
        run(made, emulator, alone, needs=(False, False, False))
        assert alone[key].equal(known)
    run(made, emulator, {})
    assert all(map(torch.equal, made.results, whole))


SCORES = {
    "bias": ("v + bias", {"bias": ("head", "row", "col")}),
    "slopes": ("v - slope * abs(row - col)", {"slope": ("head",)}),
    "sinks": ("where(col == 0, sink, v)", {"sink": ("head",)}),
    "cap": ("3 * tanh(gain * v / 3)", {"gain": ()}),
    "columns": ("v * gain + bias", {"gain": ("batch", "col"), "bias": ("head", "col")}),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("features", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(("bias",), SCORES))
def test_products_overlap_and_nothing_spills(name, features):
    text, axes = SCORES[name]
    for causal, block in product((False, True), ((128, 128), (32, 32))):
        whole = BlockSparseAttention(score=text, captured=axes, causal=causal)
        packed = [each for each, own in axes.items() if "col" in own]
        score = score_of(whole, ("float32",) * len(axes), ("v", *axes), packed)
        made = Made(Case("bfloat16", block, features=features, values=features))
        of = made.problem()._replace(score=score, captured=(View(),) * len(axes))
        kind = "pair" if "row" in next(iter(axes.values())) else "col" if packed else "row"
        collected = tuple(Collected(i, kind, View(800, 400, 20, 1)) for i in range(len(axes)))
        problem = AttentionGradient(of, *(of.q,) * 4, collected=collected)
        (spec,) = (
            spec
            for spec in launches_of(HOPPER, problem, None, hopper.ARCH).specs
            if "captured" in spec.description
        )
        found = compiled(spec, hopper.ARCH)
        # Of two results of one warpgroup the gathering producer has 24 registers.
        spilled = 64 if kind == "col" and features > 96 and block[0] < 128 else 0
        assert not found.serialized and found.spilled <= spilled, spec.description
