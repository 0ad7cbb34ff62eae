"""Attention by wgmma and tensor maps, run by threads of the host, against its formula in float64;
and what NVRTC makes of it."""

import struct
from functools import partial

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention import hopper
from kernlib.families.blocksparse.kernels.attention.base import Scope
from kernlib.families.blocksparse.lowering.attention.problem import Score
from kernlib.lowering.kernel import Gpu
from tests.families.blocksparse.lowering.attention.cases import (
    HOPPER,
    Case,
    Made,
    is_intact,
    launches_of,
)
from tests.families.blocksparse.lowering.attention.scores import BIASED, with_least
from tests.families.blocksparse.lowering.attention.wgmma import WGMMA_CASES
from tests.families.blocksparse.products import launch
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

ARCH = hopper.ARCH
COUNT = 3  # multiprocessors, so that a team has several tiles

FAST = ("64", "16", "causal", "lengths", "all at once", "one row")


def run(emulator, made, rows=None, count=COUNT):
    """The result, after the launches of tiles of so many rows that share K and V."""
    problem = made.problem()
    assert HOPPER.takes(problem, ARCH)
    choice = None if rows is None else {"rows": rows}
    made.out.fill_(7.0)
    made.launch(partial(launch, emulator), launches_of(HOPPER, problem, choice, ARCH, count))
    assert is_intact(made.out)
    return made.out


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(FAST, WGMMA_CASES))
def test_results_are_right(case, emulator, seed):
    made = Made(WGMMA_CASES[case])
    run(emulator, made)
    made.check()


@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(("ragged",), WGMMA_CASES))
def test_tiles_that_two_warpgroups_share(case, emulator, seed):
    made = Made(WGMMA_CASES[case])
    run(emulator, made, 128)
    made.check()


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("layout, kv_heads", [("head", 3), ("batch", 6)])
def test_group_after_group_of_heads(layout, kv_heads, emulator, seed, monkeypatch):
    """Each of the heads that share K and V."""
    monkeypatch.setattr(hopper, "GROUP_BYTES", 1)
    monkeypatch.setattr(hopper, "LAST_TILES", 1)
    case = Case(queries=150, keys=80, batch=2, heads=6, kv_heads=kv_heads, layout=layout)
    made = Made(case)
    order, _ = launches_of(HOPPER, made.problem(), {"rows": 64}, ARCH, 1).steps
    per_group, last = struct.unpack("<2i", order.fixed[-16:-8])
    assert (per_group, last) == ((6, 2) if layout == "head" else (3, 11))
    run(emulator, made, 64, 1)
    made.check()


ODD = {
    "behind a length": Case(
        block=(32, 64), queries=90, keys=180, batch=3, lengths=True, density=1.0, features=72,
        values=72,
    ),
    "above a diagonal": Case("bfloat16", (64, 32), 150, 150, causal=True, density=0.9),
    "beside stored blocks": Case(queries=70, keys=300, density=0.3, layout="head"),
    "outside of a window": Case(
        block=(16, 128), queries=130, keys=256, window=(9, 40), density=1.0, dropout=0.2
    ),
    "left out by a mask": Case(
        queries=70, keys=130, features=136, values=136, heads=1, kv_heads=1, density=1.0,
        mask=lambda row, col, head, batch: (row + col) % 3 > 0,
        text="""struct Score : PlainScore {
            using PlainScore::PlainScore;
            __device__ __forceinline__ bool keeps(int row, int col) const {
                return (row + col) % 3 > 0;
            }
        };""",
    ),
}  # fmt: skip


@pytest.mark.emulated
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("case", slow_but(("behind a length", "beside stored blocks"), ODD))
def test_numbers_that_are_not_finite_stay_in_rows_that_see_them(case, rows, emulator, seed):
    made = Made(ODD[case])
    if made.case.mask is not None:
        left = made.sees() & made.case.mask(*made.places())
        made.sees = lambda: left
    nan, infinite = float("nan"), float("inf")
    keys = made.case.keys
    for t, value in ((made.v, nan), (made.v, infinite), (made.v, -infinite), (made.k, nan)):
        column = torch.randint(keys // 2, keys, ()).item()
        t[..., column, column % 16 : 16 + column % 16] = value
    made.q[..., 5, 0] = nan
    if made.case.lengths:
        made.k[..., made.kv_lengths.max() :, :] = nan
        made.v[..., made.kv_lengths.max() :, :] = nan
    run(emulator, made, rows)
    made.check()


@pytest.mark.emulated
@pytest.mark.parametrize("rows", [64, 128])
def test_scores_read_captured_tensors_where_rows_and_columns_exist(rows, emulator, seed):
    case = Case(
        "bfloat16", (32, 64), 75, 141, batch=2, density=0.6, dropout=0.1, text=BIASED,
        score=lambda v, row, col, head, batch, bias: v + bias.double(),
    )  # fmt: skip
    bias = torch.randn(2, 1, 75, 141).expand(2, 2, 75, 141)
    made = Made(case, (bias,))
    run(emulator, made, rows)
    made.check()


@pytest.mark.emulated
@pytest.mark.parametrize("rows", [64, 128])
def test_rows_of_the_least_float_have_weights_of_one_size(rows, emulator, seed):
    case, given = with_least(Case("bfloat16", (32, 64), 75, 141, batch=2, density=0.6))
    made = Made(case, given)
    run(emulator, made, rows)
    made.check()
    assert made.lse[:, :, :10].gt(-torch.inf).any()


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("size", [1e9, 1e12])
def test_large_logits_are_told_apart(size, emulator, seed):
    """Whose products with log2 e are rounded by more than a weight is."""
    made = Made(Case("bfloat16", (32, 64), 75, 141, heads=1, kv_heads=1, density=0.8))
    for t in (made.q, made.k):
        t.mul_(size**0.5)
    run(emulator, made)
    made.check()


@pytest.mark.emulated
def test_a_row_does_not_depend_on_the_gpu(emulator, seed):
    """Which takes tiles from a counter if it has few multiprocessors."""
    made = Made(WGMMA_CASES["64"])
    known = run(emulator, made, 64, 1).clone()
    assert run(emulator, made, 64, 132).equal(known)


def test_what_the_kernel_takes():
    problem = Made(Case()).problem()
    assert HOPPER.takes(problem, ARCH) and not HOPPER.takes(problem, "sm_120")
    apart = problem.q._replace(row=36), problem.q._replace(alignment=8)
    for changed in (
        {"dtype": "float32"}, {"features": 12, "values": 12}, {"values": 40}, {"q": apart[0]},
        {"features": 264, "values": 264}, {"out": apart[1]}, {"k": apart[1]}, {"keys": 2**30 + 1},
        {"blocks": problem.blocks._replace(cols=8)}, {"queries": 0}, {"batch": 0},
    ):  # fmt: skip
        assert not HOPPER.takes(problem._replace(**changed), ARCH), changed
    one = problem._replace(k=problem.k._replace(head=0), v=problem.v._replace(head=0, batch=0))
    assert HOPPER.takes(one, ARCH)


def test_lines_of_blocks_and_multiprocessors_decide_what_rows_share():
    problem = Made(Case()).problem()._replace(queries=128 * 20)
    tall = problem._replace(blocks=problem.blocks._replace(rows=128))
    assert HOPPER.default(problem, Gpu(ARCH, 40)) == {"rows": 64}
    assert HOPPER.default(tall, Gpu(ARCH, 40)) == {"rows": 128}
    assert HOPPER.default(tall, Gpu(ARCH, 41)) == {"rows": 64}


SCORES = {
    "plain": Score(),
    "causal": Score(causal=True),
    "window": Score(window=True),
    "lengths": Score(lengths=True),
    "biased": Score(BIASED, ("float32",), has_score=True),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("score", slow_but(("plain",), SCORES))
@pytest.mark.parametrize("width", slow_but((128,), hopper.WIDTHS))
def test_kernels_compile_without_spills(width, score):
    """But for a few words of those whose sums take 128 registers, or that read as they go."""
    words = 60 if width == 256 or SCORES[score].has_score else 0
    for block in ((16, 64), (128, 128)):
        scope = Scope(block, ("bfloat16",), ARCH, width, width)
        for spec in HOPPER.specs(SCORES[score], scope, ARCH):
            made = compiled(spec, ARCH)
            assert made.spilled <= 4 * words and not made.serialized, spec.description
