"""Lowering of reductions of kernel matrices: code, grid, parameters, and what NVRTC makes of it."""

import ctypes
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.families.pairwise.lowering import direct
from kernlib.families.pairwise.lowering import reduce as lowering
from kernlib.families.pairwise.lowering.direct import scalar_count
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.families.pairwise.reductions import kernels
from kernlib.jit import sources, targets
from kernlib.jit.compiler import compile_spec
from kernlib.lowering import division
from kernlib.lowering.steps import NUMBER
from tests.families.pairwise.lowering.structs import parameters_type
from tests.support.kernels import only, stem
from tests.support.speeds import slow_but

GAUSSIAN = kl.gaussian()
HERE = "sm_90a"


def problem(reduction="matmul", m=5000, n=7000, k=3, columns=1, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    columns = columns if reduction == "matmul" else 0
    fields = {
        "a": Layout(m * k, k, 1),
        "b": Layout(n * k, k, 1),
        "v": Layout(0, columns, 1),
        "columns": columns,
        "out_columns": columns,
    }
    return Problem(reduction, m, n, k, batch, **(fields | changes))


def lowered(descriptor=GAUSSIAN, arch=HERE, processors=132, per_split=0, rows=None, **changes):
    strides = (0,) * scalar_count(descriptor)
    return lowering.lower(
        descriptor, problem(**changes), arch, processors, strides, per_split, rows
    )


# Which kernel.


@pytest.mark.parametrize(("k", "kind"), [(1, "small"), (16, "small"), (17, "tile"), (300, "tile")])
def test_few_features_stay_in_registers(k, kind):
    found = lowered(k=k)
    assert stem(only(found).spec) == f"pairwise_reduce_{kind}"
    assert f'#include "pairwise/reduce/{kind}.cuh"' in only(found).spec.source
    assert ("constexpr bool LONG_K = true;" in only(found).spec.source) == (k > 128)


@pytest.mark.parametrize(("columns", "width"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (16, 16)])
def test_columns_are_rounded_up(columns, width):
    assert f"#define REDUCER Matmul<{width}>\n" in only(lowered(columns=columns)).spec.source


@pytest.mark.parametrize("reduction", lowering.REDUCERS)
def test_reductions_without_v(reduction):
    found = lowered(reduction=reduction)
    assert f"#define REDUCER {lowering.REDUCERS[reduction]}\n" in only(found).spec.source


def test_the_reducers_are_those_of_the_source():
    text = sources.read("pairwise/reduce/reducers.cuh")
    assert {*lowering.REDUCERS.values(), "Matmul"} <= set(re.findall(r"^struct (\w+)", text, re.M))


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


FINISH = {
    "gaussian": (GAUSSIAN, "v = exp2_approximate(v * constant_"),
    "laplace": (kl.laplace_l2(), "AccT v = sqrt(s);"),
    "power": (kl.laplace_pq(), ", parameter_q) * constant_"),
    "sum": (kl.l1_distance(epilogue=kl.Custom("exp(v + s)", ("s",))), "exp2_approximate((v + "),
    "none": (kl.l1_distance(), "AccT v = s;"),
}


@pytest.mark.parametrize("name", FINISH)
def test_exponentials_take_one_multiplication(name):
    descriptor, text = FINISH[name]
    source = only(lowered(descriptor, root=descriptor == kl.laplace_pq())).spec.source
    assert text in source and " exp(" not in source


def test_a_factor_of_the_exponent_keeps_its_sign():
    source = only(lowered(GAUSSIAN)).spec.source
    assert re.search(r"constant_\d+ = for_exp2\(constant_\d+\)", source)
    assert "(AccT(-1.0) * " in source
    twice = kl.l1_distance(epilogue=kl.Custom("exp(-(-v) / s)", ("s",)))
    assert "AccT(-1.0)" not in only(lowered(twice)).spec.source


@pytest.mark.parametrize("epsilon", [False, True])
def test_epsilon_costs_nothing_where_it_is_not_given(epsilon):
    assert ("absolute(v) < epsilon" in only(lowered(epsilon=epsilon)).spec.source) == epsilon


# The parameter block, against the struct of the CUDA source.


@pytest.mark.parametrize("descriptor", [kl.l1_distance(), GAUSSIAN, kl.laplace_pq()], ids=str)
def test_the_parameter_block_is_the_struct_of_the_source(descriptor):
    count = scalar_count(descriptor)
    strides = tuple(range(70, 70 + count))
    given = problem(
        m=1001, n=2002, k=5, batch=3, columns=2, out_columns=9, diagonal=-(2**35),
        a=Layout(11, 12, 13), b=Layout(2**40, 22, 23), v=Layout(31, 2**33, 1),
    )  # fmt: skip
    found = lowering.lower(descriptor, given, HERE, 132, strides)
    numbers = [x for index in range(count) for x in (index + 0.5, index + 900)]
    head = struct.pack(f"<{len(lowering.OPERANDS)}Q" + NUMBER * count, 1, 2, 3, 4, 5, *numbers)
    kind = parameters_type("reduce/parameters.cuh", count)
    data = head + only(found).fixed
    assert ctypes.sizeof(kind) == len(data)
    read = kind.from_buffer_copy(data)
    assert (read.a, read.b, read.v, read.out, read.indices) == (1, 2, 3, 4, 5)
    assert [(s.value, s.device) for s in read.scalars] == [
        (index + 0.5, index + 900) for index in range(count)
    ]
    assert tuple(read.scalar_strides) == strides
    assert list(read.a_view) == [11, 12, 13] and list(read.b_view) == [2**40, 22, 23]
    assert list(read.v_view) == [31, 2**33, 1]
    assert (read.m, read.n, read.batch, read.diagonal) == (1001, 2002, 3, -(2**35))
    assert (read.k, read.columns, read.out_columns) == (5, 2, 9)
    assert read.per_split == found.per_part
    assert read.row_blocks * found.parts == only(found).grid[0] and only(found).grid[1] == 3


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


def test_partial_results_of_another_launch_lie_side_by_side():
    first = lowered(m=300, n=10**5, columns=16, out_columns=17)
    second = lowered(m=300, n=10**5, out_columns=17, per_split=first.per_part)
    assert first.parts == second.parts > 1


def test_a_block_counts_its_n_in_an_int():
    found = lowered(m=10**6, n=3 * 2**30, columns=16, batch=1000)
    assert found.per_part <= division.MAX_PLACES


def test_passes_share_their_splits():
    first = lowered(columns=16, out_columns=17)
    second = lowered(columns=1, out_columns=17, per_split=first.per_part)
    assert first.parts == second.parts
    assert kernels.passes(33) == [(0, 16), (16, 16), (32, 1)]
    assert kernels.passes(0) == [(0, 0)]


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
    entry = compile_spec(wanted, HERE)
    registers, spilled = int(entry.meta["registers"]), int(entry.meta["spill_bytes"])
    assert entry.kernel == wanted.entry and entry.cubin[:4] == b"\x7fELF"
    assert registers <= 128
    assert spilled <= (SMALL_SPILL if "small" in stem(wanted) else TILE_SPILL)
    shared = int(entry.meta["shared_bytes"])
    assert targets.resident_blocks(HERE, wanted.threads, registers, shared) >= lowering.RESIDENT


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize("changes", [{"k": 3}, {"k": 3, "rows": 1}, {"k": 64}], ids=str)
def test_other_architectures_compile_it(arch, changes):
    found = lowered(arch=arch, m=10**5, n=10**5, **changes)
    assert compile_spec(only(found).spec, arch).cubin[:4] == b"\x7fELF"


@pytest.mark.parametrize(("k", "long"), [(64, False), (100, True), (129, True)])
def test_long_sums_are_totalled_where_that_fits(k, long):
    assert lowering.variant(problem(k=k), HERE).long_k is long
    small = lowering.variant(problem(k=k, columns=16), "sm_89")
    assert small.long_k is (k > 128)
    assert lowering.fits(problem(k=k, columns=16), "sm_89") == (k <= 128)
