"""Attention by mma.sync, run by threads of the host, against its formula in float64; and what NVRTC
makes of it."""

import math

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention.base import Scope
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.attention.problem import Score
from kernlib.lowering.kernel import Gpu
from tests.families.blocksparse.lowering.attention.cases import ARCH, CASES, PORTABLE, Case, Made
from tests.families.blocksparse.lowering.attention.scores import (
    ALIBI,
    DOCUMENTS,
    SOFT_BIAS,
    with_least,
)
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

FAST = ("all at once",)
# Of one kernel, which is compiled once.
CUT = Case(queries=100, keys=112, causal=True, window=(40, 0), lengths=True, density=0.7)
NARROW = [name for name, case in CASES.items() if max(case.features, case.values) <= 128]


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_results_are_right(case, emulator, seed):
    made = Made(CASES[case])
    made.run(emulator)
    made.check()


@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(("ragged",), NARROW))
def test_tiles_of_more_rows_are_right_too(case, emulator, seed):
    made = Made(CASES[case])
    made.run(emulator, 128)
    made.check()
    assert made.run(emulator, 128).clone().equal(made.out)


@pytest.mark.emulated
def test_what_is_left_out_may_be_anything(emulator, seed):
    """NaN and infinities in blocks that are not stored, behind the end and beyond causality or a
    window; where they are seen, a row is NaN."""
    made = Made(CUT)
    mask = torch.rand(7, 7) < 0.7
    mask[3] = False
    mask[2, 2] = mask[4, 3] = True  # of columns 37 and 60
    made.layout = Layout(mask, 16)
    made.q_lengths.fill_(95)
    made.kv_lengths.fill_(90)
    clean = made.run(emulator).clone()
    sees = made.sees()
    for t, value in ((made.k, math.nan), (made.v, math.nan), (made.v, math.inf)):
        kept = t[:, :, 90:].clone()
        t[:, :, 90:] = value
        assert made.run(emulator).equal(clean)
        t[:, :, 90:] = kept
    made.v[:, :, 37, 3] = math.nan
    made.v[:, 1, 60] = math.inf
    found = made.run(emulator)
    assert not found.isfinite().all()
    made.check()
    unseen = ~(sees[..., 37] | sees[..., 60])
    assert unseen.any() and not unseen.all()
    # A cut tile that holds what is not finite is added up one by one, and so in another order.
    torch.testing.assert_close(found[unseen], clean[unseen], rtol=2e-3, atol=1e-6)


@pytest.mark.emulated
def test_rows_with_what_is_no_number_are_none(emulator, seed):
    """A NaN or an infinite logit that is kept; -inf is as if it were left out."""
    made = Made(Case(density=0.6, heads=1, kv_heads=1))
    made.k[0, 0, 5] = math.nan
    made.q[0, 0, 20] = math.inf
    made.q[0, 0, 70:] = 0.0
    made.k[0, 0, 40, 0] = math.inf  # of rows of q on either side of 0
    made.run(emulator)
    made.check()
    assert made.out.isnan().any() and not made.out.isnan().all()


@pytest.mark.emulated
def test_a_score_changes_logits(emulator, seed):
    """By a number of its head, read from memory, at rows and columns that exist."""
    slopes = torch.rand(1, 3, 1, 1)
    case = Case(
        queries=70, keys=90, heads=3, kv_heads=3, causal=True, density=0.8, text=ALIBI,
        score=lambda v, row, col, head, batch, slopes: v + slopes.double() * (col - row),
    )  # fmt: skip
    made = Made(case, (slopes,))
    made.run(emulator)
    made.check()


@pytest.mark.emulated
def test_rows_of_the_least_float_have_weights_of_one_size(emulator, seed):
    """As masks of it are added: the mean of v, and a finite log-sum-exp."""
    made = Made(*with_least(Case(queries=75, keys=90, batch=2, density=0.7)))
    made.run(emulator)
    made.check()
    assert made.lse[:, :, :10].gt(-math.inf).any()


@pytest.mark.few(1)
@pytest.mark.emulated
def test_a_mask_leaves_elements_out(emulator, seed):
    """Rows of which nothing is left are 0, also beside values that are no numbers."""
    of_rows = torch.randint(0, 4, (2, 1, 75, 1)).sort(2).values
    of_cols = torch.randint(0, 3, (2, 1, 1, 90)).sort(3).values  # nothing for the last document
    case = Case(
        queries=75, keys=90, batch=2, density=0.9, text=DOCUMENTS,
        mask=lambda row, col, head, batch, of_rows, of_cols: of_rows == of_cols,
    )  # fmt: skip
    made = Made(case, (of_rows, of_cols))
    made.run(emulator)
    made.check()
    empty = (of_rows == 3)[..., 0].expand(2, 2, 75)
    assert not made.out[empty].any() and made.lse[empty].eq(-math.inf).all()
    made.v[:, :, 30] = math.nan
    assert not made.run(emulator)[empty].any()


@pytest.mark.few(1)
@pytest.mark.emulated
def test_weights_of_zero_length(emulator, seed):
    """No rows of k at all, and a batch of which no row counts."""
    made = Made(CUT._replace(queries=40, keys=64, batch=2, density=1.0))
    made.q_lengths.copy_(torch.tensor([0, 40]))
    made.kv_lengths.copy_(torch.tensor([64, 0]))
    assert not made.run(emulator).any() and made.lse.eq(-math.inf).all()


def test_what_the_kernel_takes():
    made = Made(Case())
    problem = made.problem()
    assert PORTABLE.takes(problem, ARCH)
    odd = problem.q._replace(row=36), problem.q._replace(alignment=8)
    for changed in (
        {"dtype": "float32"}, {"features": 12}, {"values": 264}, {"q": odd[0]}, {"out": odd[1]},
        {"blocks": problem.blocks._replace(rows=8)}, {"keys": 2**30 + 1},
    ):  # fmt: skip
        assert not PORTABLE.takes(problem._replace(**changed), ARCH), changed


def test_more_rows_are_taken_where_there_are_enough():
    problem = Made(Case()).problem()._replace(queries=1000)
    known = PORTABLE.choices(problem, ARCH)
    assert known == [{"rows": 128}, {"rows": 64}]
    assert PORTABLE.default(problem, Gpu(ARCH, 16)) == {"rows": 128}
    assert PORTABLE.default(problem, Gpu(ARCH, 17)) == {"rows": 64}
    assert PORTABLE.default(problem._replace(queries=64, batch=99), Gpu(ARCH, 17)) == {"rows": 64}


SCORES = {
    "plain": Score(),
    "all": Score(causal=True, window=True, lengths=True, dropout=True),
    "documents": Score(DOCUMENTS, ("int64", "int64"), has_mask=True, causal=True),
    "score": Score(SOFT_BIAS, ("float32",) * 3, True, True, True, True, True, True),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("arch", slow_but(("sm_80",), ("sm_80", "sm_86", "sm_90a", "sm_120")))
@pytest.mark.parametrize("score", slow_but(("plain",), SCORES))
@pytest.mark.parametrize("width", slow_but((128,), (16, 64, 72, 96, 128, 192, 256)))
def test_kernels_compile(width, score, arch):
    kind = SCORES[score]
    found = list(PORTABLE.specs(kind, Scope((16, 64), ("bfloat16",), arch, width, width), arch))
    assert found
    for spec in found:
        made = compiled(spec, arch)
        # 32 rows a warp fill its registers: ptxas spills up to 64 bytes of what a tile begins with.
        most = 64 if "128 rows" in spec.description else 0
        assert made.spilled <= most and not made.serialized, spec.description
