"""Lowering of reductions of kernel matrices: code, grid, parameters, and what NVRTC makes of it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.pairwise.kernels import reduce
from kernlib.families.pairwise.lowering import problem as direct
from kernlib.families.pairwise.lowering import reduce as lowering
from kernlib.families.pairwise.lowering.problem import scalar_count
from kernlib.jit import targets
from kernlib.lowering import division
from tests.families.pairwise.lowering.cases import problem as of_features
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only, stem
from tests.support.speeds import slow_but

GAUSSIAN = kl.gaussian()
HERE = "sm_90a"


def problem(k=3, **changes):
    return of_features(k=k, **changes)


def lowered(descriptor=GAUSSIAN, arch=HERE, processors=132, per_split=0, rows=None, **changes):
    strides = (0,) * scalar_count(descriptor)
    return reduce.lower(descriptor, problem(**changes), arch, processors, strides, per_split, rows)


# Which kernel.


@pytest.mark.parametrize(("k", "kind"), [(1, "small"), (16, "small"), (17, "tile"), (300, "tile")])
def test_few_features_stay_in_registers(k, kind):
    found = lowered(k=k)
    assert stem(only(found).spec) == f"pairwise_reduce_{kind}"
    assert f'#include "pairwise/reduce/{kind}.cuh"' in only(found).spec.source
    assert ("constexpr bool LONG_K = true;" in only(found).spec.source) == (k > 128)


def test_sizes_and_numbers_do_not_reach_the_source():
    assert only(lowered(m=100, n=200)).spec == only(lowered(m=900, n=3000, diagonal=7)).spec
    assert only(lowered(m=10**5, n=10**5)).spec == only(lowered(m=10**6, n=10**6)).spec


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"columns": 16}, True),
        ({"columns": 17}, False),
        ({"dtype": "float64"}, False),
        ({"dtype": "bfloat16"}, True),
        ({"k": 0}, False),
        ({"n": 0}, False),
        ({"k": 2000}, True),
    ],
    ids=str,
)
def test_what_the_kernels_take(changes, taken):
    assert lowering.fits(problem(**changes), HERE) == taken


# The text of Finish.


def test_a_factor_of_the_exponent_keeps_its_sign():
    source = only(lowered(GAUSSIAN)).spec.source
    assert re.search(r"constant_\d+ = for_exp2\(constant_\d+\)", source)
    assert "(AccT(-1.0) * " in source
    twice = kl.l1_distance(epilogue=kl.Custom("exp(-(-v) / s)", ("s",)))
    assert "AccT(-1.0)" not in only(lowered(twice)).spec.source


@pytest.mark.parametrize("epsilon", [False, True])
def test_epsilon_costs_nothing_where_it_is_not_given(epsilon):
    assert ("absolute(v) < epsilon" in only(lowered(epsilon=epsilon)).spec.source) == epsilon


# How n is divided.


@settings(max_examples=200)
@given(
    st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([3, 64]), st.integers(1, 16),
    st.integers(1, 100), st.integers(1, 200),
)  # fmt: skip
def test_splits_cover_n_and_fit_the_workspace(m, n, k, columns, batch, processors):
    found = lowered(m=m, n=n, k=k, columns=columns, batch=batch, processors=processors)
    unit = lowering.FEWEST_POINTS if k == 3 else direct.BIG_TILE
    assert found.per_part % unit == 0
    assert (found.parts - 1) * found.per_part < n <= found.parts * found.per_part
    partial = found.parts * m * batch * columns
    assert found.parts == 1 or 4 * partial <= division.WORKSPACE_BYTES


def test_few_rows_fill_a_gpu():
    assert only(lowered(m=10, n=10**6)).grid[0] >= 132
    assert only(lowered(m=10, n=10**6, k=64)).grid[0] >= 250


@pytest.mark.parametrize(
    "m, n, batch, rows, partners, blocks",
    [
        (50000, 50000, 1, 4, 1, 245),
        (20000, 20000, 1, 4, 1, 240),
        (10**6, 10, 1, 4, 1, 977),
        (2000, 2000, 200, 4, 1, 2),
        (2000, 2000, 1, 2, 32, 125),
        (1000, 1000, 1, 1, 32, 125),
        (10, 10**6, 1, 2, 32, 132),
    ],
)
def test_partners_share_rows_where_few_blocks_would_have_whole_ones(
    m, n, batch, rows, partners, blocks
):
    found = lowered(m=m, n=n, k=3, batch=batch)
    text = only(found).spec.description
    assert f"rows={rows}" in text and (f"partners={partners}" in text) == (partners > 1)
    assert only(found).grid[0] == blocks
    if partners == 1 and m == n:
        assert found.per_part % direct.THREADS == 0


@pytest.mark.parametrize("reduction", ["matmul", "sum", "min", "logsumexp"])
def test_small_problems_take_one_launch(reduction):
    """What would join partial results takes as long again, or three times as long."""
    for m in (1, 100, 1000, 2000):
        assert lowered(reduction=reduction, m=m, n=m).parts == 1


def test_rows_that_are_given_have_no_partners():
    text = only(lowered(m=100, n=100, rows=3)).spec.description
    assert "rows=3" in text and "partners" not in text


def test_a_block_counts_its_n_in_an_int():
    found = lowered(m=10**6, n=3 * 2**30, columns=16, batch=1000)
    assert found.per_part <= division.MAX_PLACES


def test_passes_share_their_splits():
    first = lowered(columns=16, out_columns=17)
    second = lowered(columns=1, out_columns=17, per_split=first.per_part)
    assert first.parts == second.parts
    assert reduce.SMALL.passes(33) == [(0, 16), (16, 16), (32, 1)]
    assert reduce.SMALL.passes(0) == [(0, 0)]


# What NVRTC makes of it.

COMPILED = {
    "gaussian": (GAUSSIAN, {}),
    "gaussian 16 columns of 16 features": (GAUSSIAN, {"k": 16, "columns": 16}),
    "gaussian of partners": (GAUSSIAN, {"m": 500, "n": 500}),
    "two rows of partners": (GAUSSIAN, {"m": 2000, "n": 2000, "k": 9, "columns": 4}),
    "16 columns of partners": (GAUSSIAN, {"m": 500, "n": 500, "k": 16, "columns": 16}),
    "minimum of partners": (kl.l2_distance(), {"m": 500, "n": 500, "reduction": "min"}),
    "sum": (GAUSSIAN, {"reduction": "sum", "k": 8}),
    "logsumexp": (GAUSSIAN, {"reduction": "logsumexp", "regularized": True}),
    "shifted logsumexp": (kl.squared_distance(), {"reduction": "logsumexp", "shifted": True}),
    "minimum": (kl.l2_distance(), {"reduction": "min"}),
    "half": (kl.laplace_l2(), {"dtype": "float16", "epsilon": True}),
    "pq": (kl.laplace_pq(), {"root": True}),
    "tile": (GAUSSIAN, {"k": 64, "regularized": True}),
    "tile of 16 columns": (GAUSSIAN, {"k": 200, "columns": 16}),
    "tile logsumexp": (kl.laplace_l1(), {"reduction": "logsumexp", "k": 64}),
    "tile minimum": (kl.l1_distance(), {"reduction": "min", "k": 64, "dtype": "bfloat16"}),
    "signed": (kl.Pairwise(inner=kl.Identity()), {"k": 64}),
}
# Bytes, none of them in a loop over points: reducers wait in local memory for a tile's sums, and
# 16 columns of 16 features for the end of a run.
SMALL_SPILL, TILE_SPILL = 112, 320


@pytest.mark.parametrize("name", slow_but(("gaussian", "gaussian of partners", "tile"), COMPILED))
def test_the_kernel_compiles_within_its_bounds(name):
    descriptor, changes = COMPILED[name]
    wanted = only(lowered(descriptor, **{"m": 10**5, "n": 10**5} | changes)).spec
    made = compiled(wanted, HERE)
    assert made.entry.kernel == wanted.entry and made.registers <= 128
    assert made.spilled <= (SMALL_SPILL if "small" in stem(wanted) else TILE_SPILL)
    held = targets.resident_blocks(HERE, wanted.threads, made.registers, made.shared)
    assert held >= lowering.RESIDENT


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize("changes", [{"k": 3}, {"k": 3, "rows": 1}, {"k": 64}], ids=str)
def test_other_architectures_compile_it(arch, changes):
    found = lowered(arch=arch, m=10**5, n=10**5, **changes)
    assert compiled(only(found).spec, arch).entry.cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize(("k", "long"), [(64, False), (100, True), (129, True)])
def test_long_sums_are_totalled_where_that_fits(k, long):
    assert lowering.variant(problem(k=k), HERE).long_k is long
    small = lowering.variant(problem(k=k, columns=16), "sm_89")
    assert small.long_k is (k > 128)
    assert lowering.fits(problem(k=k, columns=16), "sm_89") == (k <= 128)
