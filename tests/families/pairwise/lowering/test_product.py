"""Lowering of products with many columns to tensor cores, and what NVRTC makes of it."""

import struct

import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels import product
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering import wide as variants
from kernlib.families.pairwise.lowering.problem import Call, Layout, scalar_count
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from tests.families.pairwise.lowering.cases import constant
from tests.families.pairwise.lowering.cases import problem as of_columns
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

HERE, PRODUCT = "sm_90a", product.KERNEL
GAUSSIAN, DOT, MATERN = kl.gaussian(), kl.dot_product(), kl.matern32()
MAIN = "pairwise_product_main"


def problem(columns=64, k=64, **changes):
    return of_columns(columns=columns, k=k, **changes)


def lowered(descriptor=GAUSSIAN, precision="fp32", per_split=0, **changes):
    strides = (0,) * scalar_count(descriptor)
    call = Call(descriptor, problem(**changes), strides, precision)
    return PRODUCT.launch(descriptor, call, Gpu(HERE, 132), {"per_split": per_split})


def sums(descriptor, precision="fp32", **changes):
    made = product.variants(descriptor, problem(**changes), precision)
    return tuple((each.sums, each.depth) for each in made if each)


@pytest.mark.parametrize(
    "descriptor, changes, taken",
    [
        (GAUSSIAN, {}, True),
        (GAUSSIAN, {"columns": 128, "k": 128}, True),
        (GAUSSIAN, {"columns": 129}, True),  # in two passes
        (GAUSSIAN, {"k": 129}, False),
        (DOT, {"columns": 5}, True),
        (kl.p_distance(), {"inner": 2.0, "root": True}, True),
        (kl.p_distance(), {"inner": "any", "root": True, "k": 3}, False),  # by logarithms
        (kl.p_distance(), {"inner": 3.0, "root": True, "k": 3}, False),  # sums computed anew
        (kl.exp_power_sum(), {"inner": 1.0, "k": 8}, False),  # whose terms have a scale
        (kl.exp_power_sum(), {"inner": 2.0, "k": 3}, False),
        (kl.power_sum(), {"inner": 4.0, "k": 8}, True),
        (
            GAUSSIAN,
            {"k": 3, "m": 32, "n": 32, "batch": 70000},
            False,
        ),  # of which grids have no room
        (kl.l1_distance(), {"k": 16}, True),
        (kl.l1_distance(), {"k": 17}, False),
        (kl.gaussian(direct=True), {"k": 16}, True),
        (kl.gaussian(direct=True), {"k": 17}, False),
        (GAUSSIAN, {"dtype": "float64"}, False),
        (GAUSSIAN, {"k": 0}, False),
        (GAUSSIAN, {"m": 0}, False),
        (GAUSSIAN, {"reduction": "sum"}, False),
        (GAUSSIAN, {"n": 2**27}, False),  # more workspace than a call may take
    ],
)
def test_what_it_takes(descriptor, changes, taken):
    call = Call(descriptor, problem(**changes))
    assert PRODUCT.takes(call, HERE) is taken
    assert not PRODUCT.takes(call, "sm_80")


def test_it_pays_for_many_columns_and_pairs():
    large, small = {"m": 20000, "n": 20000}, {"m": 500, "n": 500}
    for k in (3, 10, 64, 128):
        assert direct.product_pays(GAUSSIAN, problem(k=k, **large))
        assert direct.product_pays(MATERN, problem(k=k, **large))
        assert not direct.product_pays(GAUSSIAN, problem(k=k, columns=1, **small))
    assert not direct.product_pays(
        GAUSSIAN, problem(k=3, m=32, n=32, batch=20000)
    )  # mostly padding
    assert not direct.product_pays(MATERN, problem(k=3, columns=4, **large))  # the lanes sum both
    assert direct.product_pays(GAUSSIAN, problem(k=10, columns=512, **large))
    assert not direct.product_pays(GAUSSIAN, problem(k=64, columns=512, **small))  # one block of it


def test_where_sums_come_from():
    assert sums(GAUSSIAN, k=3) == (("folded", 16), ("lanes", 3))
    assert sums(GAUSSIAN, k=10) == (("folded", 48), ("words", 16))
    assert sums(GAUSSIAN, k=67) == (("folded", 208), ("words", 128))
    assert sums(GAUSSIAN, k=68) == (("words", 128),)  # too many entries
    assert sums(GAUSSIAN, k=10, epsilon=True) == (("words", 16),)
    for other in (MATERN, kl.rational_quadratic()):
        assert sums(other, k=3) == (("lanes", 3),)
        assert sums(other, k=5) == (("words", 16),)
    assert sums(kl.gaussian(direct=True), k=9) == (("lanes", 9),)
    assert sums(kl.laplace_l1(), k=9) == (("lanes", 9),)
    assert sums(kl.polynomial(2), k=33) == (("words", 64),)


def test_an_exponent_is_one_of_the_sum_alone():
    for other in (kl.laplace_l2(), kl.squared_distance(), DOT, kl.rational_quadratic()):
        assert not variants.is_exponent(other, problem(k=10))
    own = kl.Pairwise("difference", kl.Square(), kl.Identity(), (kl.Custom("exp(-s * v)", ("s",)),))
    assert variants.is_exponent(own, problem(k=10))
    twice = kl.Pairwise("difference", kl.Square(), kl.Identity(), (kl.Custom("2 * exp(-v)"),))
    assert not variants.is_exponent(twice, problem(k=10))


@pytest.mark.parametrize(
    "columns, wanted", [(1, [1]), (128, [128]), (130, [65, 65]), (257, [86, 86, 85])]
)
def test_launches_share_columns_evenly(columns, wanted):
    made = PRODUCT.passes(columns)
    assert [count for _, count in made] == wanted
    assert [first for first, _ in made] == [sum(wanted[:i]) for i in range(len(wanted))]


@pytest.mark.parametrize("descriptor", [GAUSSIAN, MATERN, DOT])
@pytest.mark.parametrize("k", [3, 64])
def test_parameters_are_as_long_as_the_device_says(descriptor, k):
    steps = [s for s in lowered(descriptor, k=k).steps if "PARAMETER_BYTES" in s.spec.source]
    assert len(steps) >= 3
    for step in steps:
        size = 8 * len(step.pointers) + 16 * step.scalars + len(step.fixed)
        assert size == constant(step, "PARAMETER_BYTES"), step.spec.entry


def test_parameters_follow_the_struct():
    given = {"m": 1001, "n": 2002, "k": 10, "batch": 3, "columns": 20, "diagonal": -7}
    made = lowered(**given)
    place = product.workspace(
        problem(**given),
        *product.variants(GAUSSIAN, problem(**given), "fp32"),
    )
    count = scalar_count(GAUSSIAN)
    folded, words = (step for step in made.steps if stem(step.spec) == MAIN)
    for step, a, b in ((folded, place.a_stride, place.b_stride),
                       (words, place.points.a_stride, place.points.b_stride)):  # fmt: skip
        read = struct.unpack(f"<{count}q9q5q4i5q2i", step.fixed)[count:]
        assert read[9:14] == (1001, 2002, 3, -7, made.per_part)
        assert read[14:18] == (10, step.grid[0] // (3 * made.parts), 20, 20)
        assert read[18:20] == (a, b)
        assert read[22:24] == (place.v_stride, made.parts)
    assert place.v_stride > 0


def test_what_lies_in_the_workspace_is_apart():
    given = problem(m=1001, n=2002, k=10, batch=3, columns=20)
    place = product.workspace(given, *product.variants(GAUSSIAN, given, "fp32"))
    starts = [place.points.size, place.v, place.lines, place.folded_a, place.folded_b, place.size]
    assert starts == sorted(starts)
    assert all(start % 16 == 0 for start in starts)
    groups = -(-2002 // product.GROUP)
    assert place.lines - place.v >= groups * 4 * (64 * 2 * 32 * 2 + 32 * 4)


def test_points_of_a_batch_are_folded_with_a_bandwidth_each():
    given = problem(m=100, n=200, k=10, batch=3)._replace(a=Layout(0, 10, 1))
    place = product.workspace(given, *product.variants(GAUSSIAN, given, "fp32"))
    assert place.points.a_stride == 0 < place.a_stride
    assert place.folded_b - place.folded_a >= 3 * place.a_stride


def test_kernels_behind_the_gate_take_all_columns():
    made = lowered(columns=40, out_columns=50, k=64)
    main = [step for step in made.steps if stem(step.spec) == MAIN]
    last = [step for step in made.steps if stem(step.spec) == "pairwise_reduce_tile"]
    assert len(main) == 2 and len(last) == 3
    for index, step in enumerate(last):
        assert f"GATED = {pack.DOUBTFUL};" in step.spec.source
        assert step.pointers[0] == ("workspace", product.CLOSED)
        offsets = dict(step.pointers[1:])
        assert (offsets["v"], offsets["out"]) == (64 * index, 64 * index)
        assert [name for name, _ in step.pointers[1:]] == list(direct.OPERANDS)
    count = scalar_count(GAUSSIAN)
    behind = [struct.unpack(f"<{count}q9q5q4i", step.fixed)[count:] for step in last]
    assert [read[13] for read in behind] == [made.per_part] * 3
    assert [read[16] for read in behind] == [16, 16, 8]
    assert all(read[17] == 50 for read in behind)


@pytest.mark.parametrize("m, n", [(10, 10**6), (30000, 30000), (10**6, 100)])
def test_parts_are_whole_groups(m, n):
    made = lowered(m=m, n=n)
    assert made.per_part % product.GROUP == 0
    assert (made.parts - 1) * made.per_part < n <= made.parts * made.per_part


def matrix():
    """Name to spec: each way of summing with few and many columns, cheap and costly epilogues."""
    cases = [
        (GAUSSIAN, "fp32", {"k": 3}),
        (GAUSSIAN, "fp32", {"k": 3, "columns": 10}),
        (GAUSSIAN, "fp32", {"k": 64, "columns": 128}),
        (GAUSSIAN, "fp32", {"k": 64, "regularized": True}),
        (GAUSSIAN, "tf32", {"k": 10, "dtype": "bfloat16"}),
        (GAUSSIAN, "fp32", {"k": 128, "columns": 96}),
        (MATERN, "fp32", {"k": 3, "columns": 128}),
        (MATERN, "fp32", {"k": 10, "columns": 16, "dtype": "float16"}),
        (kl.rational_quadratic(), "fp32", {"k": 64, "columns": 32}),
        (kl.polynomial(3), "fp32", {"k": 64, "columns": 48}),
        (kl.laplace_l1(), "fp32", {"k": 10, "columns": 64, "epsilon": True}),
    ]
    names = (MAIN, "pairwise_product_pack", "pairwise_product_fold")
    specs = [s.spec for d, p, c in cases for s in lowered(d, p, **c).steps if stem(s.spec) in names]
    return {spec.description: spec for spec in specs}


MATRIX = matrix()
# Bytes where four kinds of sums meet in one function: rows whose scale is lowered, pairs computed
# anew, which one tile in thousands takes.
RARE = 128


@pytest.mark.parametrize("name", slow_but(one_of_each(stem, MATRIX), MATRIX))
def test_a_kernel_compiles_within_its_bounds(name):
    wanted = MATRIX[name]
    made = compiled(wanted, HERE)
    assert not made.serialized
    assert made.spilled <= (RARE if "words=" in name and "rows=192" in name else 0)
    assert targets.resident_blocks(HERE, wanted.threads, made.registers, made.shared) >= 1
