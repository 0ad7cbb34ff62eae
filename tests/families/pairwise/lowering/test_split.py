"""Lowering of squared distances and dot products to tensor cores, and what NVRTC makes of it."""

import struct

import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels import split
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering.problem import (
    Call,
    Layout,
    Problem,
    Scope,
    scalar_count,
    split_pays,
)
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

HERE = "sm_90a"
SPLIT = split.Split()
INSTRUCTIONS = 4700  # 1.5 times the 3128 of the longest
GATED_SPILLS = 176  # bytes, of NVRTC 13.0 to 13.4
L2, DOT = kl.l2_distance(), kl.dot_product()


def problem(m=1000, n=2000, k=64, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    step = 1 if batch > 1 else 0
    fields = {
        "a": Layout(m * k * step, k, 1),
        "b": Layout(n * k * step, k, 1),
        "out": Layout(m * n * step, n, 1),
    }
    return Problem(m, n, k, batch, **(fields | changes))


def lowered(descriptor=L2, precision="fp32", **changes):
    call = Call(descriptor, problem(**changes), (0,) * scalar_count(descriptor), precision)
    return SPLIT.launch(descriptor, call, Gpu(HERE, 132), {})


def variants(descriptor, dtype, arch=HERE):
    return SPLIT.specs(descriptor, Scope((dtype,), arch), arch)


def parameter_bytes(step):
    return int(step.spec.source.split("PARAMETER_BYTES = ")[1].split(";")[0])


@pytest.mark.parametrize(
    "descriptor, changes, taken",
    [
        (L2, {}, True),
        (kl.gaussian(), {}, True),
        (DOT, {}, True),
        (kl.polynomial(), {"dtype": "bfloat16", "out_dtype": "bfloat16"}, True),
        (kl.p_distance(), {"inner": 2.0, "root": True}, True),
        (kl.p_distance(), {"inner": 1.0, "root": True}, False),
        (kl.l1_distance(), {}, False),
        (kl.Pairwise("dot", inner=kl.Square()), {}, False),
        (L2, {"dtype": "float64", "out_dtype": "float64"}, False),
        (L2, {"k": 0}, False),
        (L2, {"m": 2**31}, False),
        (L2, {"m": 2**22, "n": 2**22, "k": 16}, True),
        (L2, {"m": 2**24, "k": 256}, False),  # more workspace than a call may take
    ],
)
def test_it_takes_sums_of_products(descriptor, changes, taken):
    call = Call(descriptor, problem(**changes))
    assert SPLIT.takes(call, HERE) is taken
    assert not SPLIT.takes(call, "sm_80")


def test_it_pays_for_large_problems():
    assert split_pays(problem(30000, 30000, 1024))
    assert split_pays(problem(30000, 30000, 32))
    assert split_pays(problem(2000, 2000, 256))
    assert not split_pays(problem(30000, 30000, 8))
    assert not split_pays(problem(100, 100, 64))
    # Measured on an H100, us: 35.8 beside 45.0, 61.1 beside 50.1, 31.9 beside 24.8.
    assert split_pays(problem(20, 436, 689))
    assert not split_pays(problem(16, 8190, 731))  # few products a packed number
    assert not split_pays(problem(72, 721, 345))


def test_the_workspace_holds_both_operands():
    made = lowered(m=1000, n=2000, k=100)
    place = pack.workspace(problem(1000, 2000, 100), split.variant_of(L2, problem(k=100), "fp32"))
    assert made.workspace == place.size
    assert place.stages == 4  # of 32 features, added outside by two
    assert place.b_info - place.a_info == 1024 * pack.INFO_BYTES
    assert place.packed_b - place.packed_a == 1024 * 128 * 4
    assert place.size - place.packed_b == 11 * 192 * 128 * 4
    assert all(offset % 256 == 0 for step in made.steps for _, offset in step.pointers)


def test_what_batch_entries_share_is_packed_once():
    shared = problem(1000, 2000, 64, 5, b=Layout(0, 64, 1))
    place = pack.workspace(shared, split.variant_of(L2, shared, "fp32"))
    assert (place.a_stride, place.b_stride) == (1024 * 64 * 4, 0)
    assert (place.centres, place.b_points) == (1, 0)
    own = problem(1000, 2000, 64, 5)
    place = pack.workspace(own, split.variant_of(L2, own, "fp32"))
    assert (place.centres, place.b_stride) == (5, 11 * 192 * 64 * 4)


@pytest.mark.parametrize("descriptor", [L2, kl.gaussian(), kl.rational_quadratic(), DOT])
def test_parameters_are_as_long_as_the_device_says(descriptor):
    for step in lowered(descriptor).steps[:3]:
        size = 8 * len(step.pointers) + 16 * step.scalars + len(step.fixed)
        assert size == parameter_bytes(step)


def test_the_direct_kernel_waits_behind_a_gate():
    main, last = lowered(m=30000, n=30000, k=1024).steps[2:]
    assert f" GATED = {pack.DOUBTFUL};" in last.spec.source
    assert f" DOUBTFUL = {pack.DOUBTFUL};" in main.spec.source
    assert main.grid == (132, 1) and last.grid == (264, 1)
    assert last.pointers[0] == ("workspace", 0) == main.pointers[3]


def test_a_column_major_result_exchanges_the_operands():
    made = lowered(m=300, n=400, out=Layout(0, 1, 300))
    for step in made.steps:
        assert [name for name, _ in step.pointers if name in "ab"] == ["b", "a"]
    sizes = struct.unpack("<10i", made.steps[2].fixed[-40:])
    assert sizes[:3] == (400, 300, 64)


@pytest.mark.parametrize("m", [1, 128, 129, 3000, 5000])
def test_symmetric_tiles_reach_the_diagonal(m):
    symmetric = kl.l2_distance(symmetric=True)
    shape = problem(m, m)
    variant = split.variant_of(symmetric, shape, "fp32")
    count = split.tile_count(symmetric, shape, variant)
    rows, columns = -(-m // split.TILE_M), -(-m // variant.columns)
    reached = sum(
        (column + 1) * variant.columns > row * split.TILE_M
        for row in range(rows)
        for column in range(columns)
    )
    assert reached <= count <= rows * columns
    whole = split.tile_count(L2, shape, variant)
    assert whole == rows * columns


def matrix():
    """Name to spec: each kind of kernel with cheap and costly epilogues."""
    cases = [
        (L2, "fp32", {}),
        (L2, "fp32", {"k": 16}),
        (L2, "tf32", {}),
        (kl.gaussian(symmetric=True), "fp32", {}),
        (kl.matern52(), "fp32", {"dtype": "float16", "out_dtype": "float16"}),
        (kl.rational_quadratic(), "tf32", {"dtype": "bfloat16"}),
        (kl.p_distance(), "fp32", {"inner": 2.0, "root": True}),
        (DOT, "fp32", {}),
        (kl.polynomial(16), "fp32", {"dtype": "float16"}),
        (kl.polynomial(symmetric=True), "tf32", {}),
    ]
    sizes = {}, {"m": 500, "n": 500}  # of which the direct kernel takes large tiles, and small ones
    specs = [
        step.spec
        for descriptor, precision, changes in cases
        for size in sizes
        for step in lowered(descriptor, precision, **changes, **size).steps
    ]
    return {spec.description: spec for spec in specs}


MATRIX = matrix()


@pytest.mark.parametrize("name", slow_but(one_of_each(stem, MATRIX), MATRIX))
def test_a_kernel_compiles_within_its_bounds(name):
    """Without spills, but for large tiles of the direct kernel behind a gate, to which only calls
    come whose products are in doubt: 128 registers hold its sums and little more."""
    made, aside = compiled(MATRIX[name], HERE), "tile=128 " in name and name.endswith(" gated")
    assert made.spilled <= GATED_SPILLS * aside and not made.serialized
    assert made.instructions <= INSTRUCTIONS
    threads = MATRIX[name].threads
    assert targets.resident_blocks(HERE, threads, made.registers, made.shared) >= 1


def test_variants_hold_what_calls_choose():
    for descriptor, dtype in ((kl.gaussian(), "float32"), (kl.polynomial(), "float16")):
        known = set(variants(descriptor, dtype))
        for precision in pack.PRECISIONS:
            for k in (16, 100):
                made = lowered(descriptor, precision, k=k, dtype=dtype, out_dtype=dtype)
                assert {step.spec for step in made.steps} <= known
    assert variants(L2, "float32", "sm_80") == []
    assert variants(kl.l1_distance(), "float32") == []
    assert variants(L2, "float64") == []
