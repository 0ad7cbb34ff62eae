"""Lowering of reductions to tensor cores, and what NVRTC makes of it."""

import struct

import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels import split_reduce as split
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.problem import Call, scalar_count
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from tests.families.pairwise.lowering.cases import constant, problem
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

HERE = "sm_90a"
GAUSSIAN, DOT = kl.gaussian(), kl.dot_product()


def lowered(descriptor=GAUSSIAN, precision="fp32", per_split=0, choice=None, **changes):
    strides = (0,) * scalar_count(descriptor)
    call = Call(descriptor, problem(**changes), strides, precision)
    knobs = {"per_split": per_split, **(choice or {})}
    return split.KERNEL.launch(descriptor, call, Gpu(HERE, 132), knobs)


@pytest.mark.parametrize(
    "descriptor, changes, taken",
    [
        (GAUSSIAN, {}, True),
        (kl.l2_distance(), {"reduction": "min"}, True),
        (DOT, {"columns": 16}, True),
        (DOT, {"columns": 17}, False),
        (kl.p_distance(), {"inner": 2.0, "root": True}, True),
        (kl.p_distance(), {"inner": 1.0, "root": True}, False),
        (kl.l1_distance(), {}, False),
        (GAUSSIAN, {"dtype": "float64"}, False),
        (GAUSSIAN, {"k": 0}, False),
        (GAUSSIAN, {"n": 0}, False),
        (GAUSSIAN, {"m": 2**24, "k": 256}, False),  # more workspace than a call may take
    ],
)
def test_it_takes_sums_of_products(descriptor, changes, taken):
    call = Call(descriptor, problem(**changes))
    assert split.KERNEL.takes(call, HERE) is taken
    assert not split.KERNEL.takes(call, "sm_80")


def test_it_pays_for_large_problems():
    assert direct.split_pays(problem(m=100000, n=100000))
    assert direct.split_pays(problem(m=30000, n=30000, k=784))
    assert not direct.split_pays(problem(m=100000, n=100000, k=3))
    assert not direct.split_pays(problem(m=200, n=200))


@pytest.mark.parametrize(
    "precision, k, resident, promote, columns",
    [
        ("fp32", 20, 2, 0, 256),
        ("fp32", 64, 2, 0, 256),
        ("fp32", 65, 0, 2, 192),
        ("tf32", 128, 2, 0, 192),
        ("tf32", 129, 4, 0, 256),
        ("tf32", 784, 0, 0, 256),
    ],
)
def test_few_features_stay_in_shared_memory(precision, k, resident, promote, columns):
    made = split.default(GAUSSIAN, problem(k=k), precision)
    assert (made.resident, made.promote, made.columns) == (resident, promote, columns)
    stages = pack.workspace(problem(k=k), made).stages
    assert not resident or stages <= resident
    # Warpgroups in turns wait for each other with the stages of a tile in hand.
    assert not made.ordered or 2 * stages <= made.stages


def test_many_columns_take_narrow_tiles():
    for k in (64, 784):
        made = split.default(GAUSSIAN, problem(k=k, columns=1, out_columns=17), "fp32")
        assert (made.columns, made.reducer) == (128, "Matmul<1>")


@pytest.mark.parametrize("descriptor", [GAUSSIAN, kl.rational_quadratic(), DOT])
@pytest.mark.parametrize("k", [64, 784])
def test_parameters_are_as_long_as_the_device_says(descriptor, k):
    for step in lowered(descriptor, k=k).steps[:3]:
        size = 8 * len(step.pointers) + 16 * step.scalars + len(step.fixed)
        assert size == constant(step, "PARAMETER_BYTES")


def test_parameters_follow_the_struct():
    made = lowered(m=1001, n=2002, k=100, batch=3, columns=2, diagonal=-7)
    place = pack.workspace(
        problem(m=1001, n=2002, k=100, batch=3, columns=2),
        split.default(GAUSSIAN, problem(k=100, columns=2), "fp32"),
    )
    count = scalar_count(GAUSSIAN)
    read = struct.unpack(f"<{count}q9q5q4i4q2i", made.steps[2].fixed)[count:]
    assert read[9:14] == (1001, 2002, 3, -7, made.per_part)
    assert read[14:18] == (100, 8, 2, 2)
    assert read[18:22] == (place.a_stride, place.b_stride, place.a_points, place.b_points)
    assert read[22:] == (place.stages, made.parts)
    assert made.steps[2].grid == (8 * made.parts * 3, 1)


def test_the_direct_kernel_waits_behind_a_gate():
    for k, entry in ((64, "pairwise_reduce_tile"), (8, "pairwise_reduce_small")):
        main, last = lowered(m=30000, n=30000, k=k).steps[2:]
        assert stem(last.spec) == entry
        assert f"GATED = {pack.DOUBTFUL};" in last.spec.source
        assert constant(main, "DOUBTFUL") == pack.DOUBTFUL
        assert last.pointers[0] == ("workspace", 0) == main.pointers[0]
        assert last.pointers[1:] == main.pointers[5:]
        assert [name for name, _ in last.pointers[1:]] == list(direct.OPERANDS)


@pytest.mark.parametrize("k", [64, 784])
@pytest.mark.parametrize("m, n", [(10, 10**6), (30000, 30000), (100000, 100000), (10**6, 100)])
def test_both_kernels_leave_the_same_partial_results(m, n, k):
    made = lowered(m=m, n=n, k=k)
    assert made.per_part % split.default(GAUSSIAN, problem(k=k), "fp32").columns == 0
    assert (made.parts - 1) * made.per_part < n <= made.parts * made.per_part
    count = scalar_count(GAUSSIAN)
    behind = struct.unpack(f"<{count}q9q5q4i", made.steps[3].fixed)[count:]
    assert behind[13] == made.per_part
    assert made.steps[3].grid[0] == behind[15] * made.parts


def test_blocks_at_work_share_rows_that_fit_the_cache():
    assert lowered(m=30000, n=30000, k=784).parts >= 4
    assert lowered(m=10**6, n=100, k=784).parts == 1
    assert lowered(m=100, n=10**6, k=64).parts >= 100


def test_passes_share_their_splits():
    first = lowered(columns=16, out_columns=17)
    second = lowered(columns=1, out_columns=17, per_split=first.per_part)
    assert first.parts == second.parts


def matrix():
    """Name to spec: each kind of kernel with cheap and costly epilogues."""
    cases = [
        (GAUSSIAN, "fp32", {}),
        (GAUSSIAN, "fp32", {"k": 784}),
        (GAUSSIAN, "tf32", {"columns": 4}),
        (GAUSSIAN, "tf32", {"k": 784, "epsilon": True}),
        (GAUSSIAN, "fp32", {"columns": 8}),
        (GAUSSIAN, "fp32", {"columns": 8, "k": 784}),
        (GAUSSIAN, "fp32", {"columns": 4, "k": 784, "regularized": True}),
        (kl.matern52(), "fp32", {"reduction": "sum", "dtype": "float16"}),
        (kl.rational_quadratic(), "fp32", {"columns": 4}),
        (kl.laplace_l2(), "tf32", {"reduction": "min", "regularized": True}),
        (GAUSSIAN, "fp32", {"reduction": "logsumexp", "regularized": True}),
        (kl.squared_distance(), "fp32", {"reduction": "logsumexp", "shifted": True}),
        (kl.squared_distance(), "fp32", {"reduction": "logsumexp", "shifted": True, "k": 256}),
        (DOT, "fp32", {"reduction": "min", "k": 784}),
        (kl.polynomial(16), "fp32", {"dtype": "bfloat16"}),
        (GAUSSIAN, "fp32", {"k": 8}),
    ]
    specs = [s.spec for d, precision, c in cases for s in lowered(d, precision, **c).steps[2:]]
    return {spec.description: spec for spec in specs}


MATRIX = matrix()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(one_of_each(stem, MATRIX), MATRIX))
def test_a_kernel_compiles_within_its_bounds(name):
    wanted = MATRIX[name]
    made, products = compiled(wanted, HERE), stem(wanted) == "pairwise_split_reduce"
    assert not made.serialized
    assert made.spilled == 0 or not products
    resident = 1 if products else direct.RESIDENT
    held = targets.resident_blocks(HERE, wanted.threads, made.registers, made.shared)
    assert held >= resident
