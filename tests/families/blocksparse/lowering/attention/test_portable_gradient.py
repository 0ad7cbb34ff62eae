"""Gradients of attention by mma.sync, run by threads of the host, against those of its formula in
float64; and what NVRTC makes of them."""

import math

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention.base import Scope
from kernlib.families.blocksparse.lowering.attention.problem import (
    AttentionGradient,
    Score,
    View,
)
from tests.families.blocksparse.lowering.attention.cases import (
    ARCH,
    CASES,
    Case,
    Made,
    error,
    launches_of,
)
from tests.families.blocksparse.lowering.attention.gradients import (
    GATES,
    PORTABLE,
    Gradients,
    check_sums,
    soft_tensors,
    sums_of,
)
from tests.families.blocksparse.lowering.attention.scores import SOFT_BIAS, soft_bias, with_least
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

FAST = ("all at once",)
# Of one kernel, which is compiled once.
CUT = Case(queries=100, keys=112, causal=True, window=(40, 0), lengths=True, density=0.7)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_gradients_are_right(case, emulator, seed):
    made = Gradients(CASES[case])
    made.run(emulator)
    made.check()


@pytest.mark.emulated
@pytest.mark.parametrize("tile", slow_but((), ("16, 1", "32, 1", "32, 2", "64, 2")))
def test_every_tile_is_right_and_the_same_each_time(tile, emulator, seed):
    depth, stages = map(int, tile.split(","))
    made = Gradients(Case(block=(32, 16), queries=70, keys=100, heads=4, kv_heads=2, causal=True))
    made.run(emulator, {"depth": depth, "stages": stages})
    made.check()
    first = [t.clone() for t in made.results]
    made.run(emulator, {"depth": depth, "stages": stages})
    assert all(map(torch.equal, made.results, first))


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("k",), ("q", "k", "v", "qv")))
def test_only_what_is_wanted_is_written(name, emulator, seed):
    needs = tuple(each in name for each in "qkv")
    made = Gradients(Case(queries=50, keys=70, heads=1, kv_heads=1))
    made.run(emulator, needs=needs)
    for found, wanted, need in zip(made.results, made.wanted(), needs, strict=True):
        assert not need or error(found, wanted) <= GATES["float16"]


@pytest.mark.emulated
def test_gradients_by_way_of_the_logarithm_of_sums(emulator, seed):
    """Rows without anything have none."""
    made = Gradients(CUT._replace(queries=70, keys=60, density=0.5), grad_lse=True)
    made.made.grad.mul_(0.3)
    empty = made.made.lse.isneginf()
    made.grad_lse[empty] = math.nan
    made.run(emulator)
    made.check()
    assert empty.any() and not made.dq[empty].any()


@pytest.mark.emulated
def test_rows_of_the_least_float_have_gradients_of_weights_of_one_size(emulator, seed):
    """By what the kernel of the result says of them."""
    case, given = with_least(Case(queries=75, keys=90, batch=2, density=0.7))
    made, sums = Gradients(case, given), {(0, "pair"): torch.zeros(given[0].shape)}
    made.made.run(emulator)
    made.run(emulator, sums=sums)
    made.check()
    check_sums(made, sums, given)


@pytest.mark.few(1)
@pytest.mark.emulated
def test_what_is_left_out_may_be_anything(emulator, seed):
    """NaN and infinities in k and v of columns that no row sees, in q and grad of rows that see
    nothing, and beyond causality, a window or lengths beside others that are seen."""
    made = Gradients(CUT)
    given = made.made
    given.kv_lengths.fill_(90)
    given.q_lengths.fill_(85)
    made.renew()
    made.run(emulator)
    made.check()
    clean = [t.clone() for t in made.results]
    for t, end in ((given.k, 90), (given.v, 90), (given.q, 85), (given.grad, 85), (given.out, 85)):
        t[:, :, end:] = math.nan
    made.run(emulator)
    assert all(map(torch.equal, made.results, clean))


@pytest.mark.few(1)
@pytest.mark.emulated
def test_a_row_that_is_no_number_stays_among_those_that_see_it(emulator, seed):
    """A NaN in a row of q, in that of grad beside it, and in a column of k."""
    size = {"queries": 60, "keys": 64, "heads": 1, "kv_heads": 1, "window": (9, 0), "density": 1.0}
    made = Gradients(CUT._replace(**size))
    given = made.made
    given.q_lengths.fill_(60)
    given.kv_lengths.fill_(64)
    made.renew()
    made.run(emulator)
    clean = [t.clone() for t in made.results]
    given.q[0, 0, 21, 3] = math.nan
    given.k[0, 0, 45, 2] = math.nan
    made.renew()
    made.run(emulator)
    seen = given.sees()[0, 0]
    odd = seen[:, 45].clone()
    odd[21] = True  # rows that are NaN
    assert made.dq[0, 0, odd].isnan().all() and agree(made.dq[0, 0, ~odd], clean[0][0, 0, ~odd])
    columns = seen[odd].any(0)
    assert made.dv[0, 0, columns].isnan().all() and made.dk[0, 0, columns].isnan().all()
    for found, known in zip(made.results[1:], clean[1:], strict=True):
        assert agree(found[0, 0, ~columns], known[0, 0, ~columns])


def agree(found, known):
    """To a unit in the last place of float16: beside a NaN sums are formed in another order."""
    return torch.allclose(found.double(), known.double(), rtol=2**-10, atol=1e-5)


@pytest.mark.emulated
@pytest.mark.parametrize("dropout", slow_but((0.0,), (0.0, 0.25)))
def test_scores_and_what_they_capture(dropout, emulator, seed):
    """By rows of all heads, columns of a head, pairs of a batch; a mask leaves some out."""
    case = Case(queries=75, keys=90, batch=2, heads=4, causal=True, density=0.8, dropout=dropout)
    captured, sums = soft_tensors(case, (2, 1)), sums_of(case)
    made = Gradients(soft_bias(case), captured)
    made.run(emulator, sums=sums)
    made.check()
    check_sums(made, sums, captured)


@pytest.mark.emulated
@pytest.mark.parametrize("over", slow_but((), ("batches", "heads", "both")))
def test_gradients_by_pairs_are_summed_where_nobody_tells_them_apart(over, emulator, seed):
    """By one lane, in the order of batches and heads: the same bits each time, and beside those of
    rows, which are summed with them."""
    pairs = tuple(1 if over in (name, "both") else 2 for name in ("batches", "heads"))
    case = Case(queries=70, keys=90, batch=2, density=0.6)
    _, of_columns, of_pairs = soft_tensors(case, pairs)
    captured = torch.randn(*pairs, 70, 1) * 0.3, of_columns, of_pairs
    made = Gradients(soft_bias(case), captured)
    given = []
    for _ in range(2):
        sums = {(n, kind): torch.zeros(captured[n].shape) for n, kind in ((0, "row"), (2, "pair"))}
        made.run(emulator, sums=sums)
        made.check()
        check_sums(made, sums, captured)
        given.append([*sums.values(), *(t.clone() for t in made.results)])
    assert all(map(torch.equal, *given))


def test_rows_and_their_gradients_are_what_the_kernel_takes():
    made = Gradients(Case())
    problem = made.problem()
    assert PORTABLE.takes(problem, ARCH)
    for name in ("grad", "dq", "dk", "dv"):
        odd = problem._replace(**{name: getattr(problem, name)._replace(row=44)})
        assert not PORTABLE.takes(odd, ARCH), name


SCORES = {
    "plain": Score(),
    "all": Score(causal=True, window=True, lengths=True, dropout=True),
    "score": Score(SOFT_BIAS, ("float32",) * 3, True, True, True, True, True, True),
}


@pytest.mark.few(0)
@pytest.mark.parametrize("arch", slow_but(("sm_80",), ("sm_80", "sm_86", "sm_90a", "sm_120")))
@pytest.mark.parametrize("score", slow_but(("all",), SCORES))
@pytest.mark.parametrize("width", slow_but((128,), (16, 64, 72, 96, 128, 192, 256)))
def test_kernels_compile_without_spills(width, score, arch):
    attention = Made(Case("bfloat16", (16, 64))).problem()._replace(features=width, values=width)
    views = (View(),) * len(SCORES[score].captured)
    attention = attention._replace(score=SCORES[score], captured=views)
    problem = AttentionGradient(attention, *(attention.q,) * 4, has_grad_lse=True)
    found = launches_of(PORTABLE, problem, None, arch).specs
    assert len(found) == 3
    for spec in found:
        made = compiled(spec, arch)
        assert made.spilled == 0 and not made.serialized, spec.description


@pytest.mark.slow
@pytest.mark.parametrize("width", (64, 256))
def test_every_variant_compiles(width):
    scope = Scope((128, 32), ("float16",), "sm_90a", width, width)
    for spec in PORTABLE.specs(Score(), scope, "sm_90a"):
        assert compiled(spec, "sm_90a").spilled == 0, spec.description
