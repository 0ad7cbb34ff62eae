"""Estimates of the kinds of kernels beside what was measured, and which kind and tile are taken:
of products batch first with d > 1, of large batches by way of batch last, and of small ones."""

import pytest

from kernlib.families.kronecker_sparse.kernels.factor import portable
from kernlib.families.kronecker_sparse.kernels.lanes import interleaved, via_batch_last
from kernlib.families.kronecker_sparse.lowering import choose, times
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, is_small
from tests.families.kronecker_sparse.lowering.cases import (
    ARCH,
    KINDS,
    PROCESSORS,
    by_x,
    entries,
    factor,
    kind_of,
    kinds_of,
    problem,
    weight_gradient,
)

HALF, TF32, FP32 = ("float16", "fp32"), ("float32", "tf32"), ("float32", "fp32")
# Pattern, rows and dtype; microseconds in CUDA graphs by kinds and tiles.
MEASURED = {
    ((11, 155, 21, 49), 638, "float16"): {"transposed": 218.1, "portable 128x64": 934.5},
    ((7, 149, 4, 21), 3550, "float16"): {"transposed": 282.2, "portable 128x128": 866.8},
    ((2, 210, 9, 19), 916, "float32"): {"transposed": 42.3, "portable 128x64": 109.5},
    ((28, 27, 52, 19), 4956, "float16"): {"transposed": 529.1, "portable 128x64": 1112.5},
    ((5, 68, 28, 23), 1376, "float32"): {"transposed": 85.6, "portable 64x64": 189.4},
    ((35, 8, 8, 44), 151, "float16"): {"transposed": 35.5, "portable 64x64": 53.3},
    ((8, 11, 5, 37), 2772, "float32"): {"transposed": 120.1, "portable 128x64": 197.2},
    ((27, 26, 459, 3), 3293, "float16"): {"transposed": 325.6, "portable 128x64": 193.2},
    ((30, 35, 26, 3), 9721, "float32"): {"transposed": 292.4, "portable 128x64": 182.6},
    ((2, 34, 272, 39), 9, "float16"): {"transposed": 13.6, "portable 64x64": 16.5},
    ((22, 186, 26, 3), 105, "float16"): {"transposed": 14.4, "portable 64x64": 7.5},
    ((5, 308, 34, 40), 1242, "float16"): {"transposed": 210.1, "interleaved": 372.5},
    ((4, 64, 64, 40), 8192, "float16"): {"transposed": 375.5, "interleaved": 505.6},
    ((2, 32, 200, 56), 2000, "float16"): {"transposed": 127.2, "interleaved": 72.5},
    ((2, 96, 48, 12), 25088, "float32"): {"transposed": 380.7, "interleaved": 440.7},
    ((3, 9, 163, 12), 98, "float32"): {"interleaved": 20.7, "portable 64x64": 11.6},
    ((5, 5, 7, 12), 116, "float32"): {"interleaved": 7.3, "portable 64x64": 4.2},
    ((1, 92, 500, 8), 204, "float32"): {"interleaved": 48.0, "portable 64x64": 29.3},
    ((5, 12, 89, 8), 4743, "float32"): {"interleaved": 39.5, "portable 128x64": 86.8},
    ((9, 32, 21, 16), 237, "float16"): {"interleaved": 9.2, "portable 64x64": 18.5},
    ((38, 5, 66, 16), 390, "float16"): {"interleaved": 21.4, "portable 64x64": 99.6},
    ((8, 8, 242, 12), 3644, "float16"): {"transposed": 200.6, "portable 128x64": 302.2},
    ((5, 8, 96, 9), 7687, "float32"): {"transposed": 170.4, "portable 128x64": 156.3},
    ((27, 48, 27, 12), 3734, "float16"): {"transposed": 247.8, "portable 128x64": 523.4},
    ((3, 15, 76, 54), 420, "float32"): {"transposed": 39.5, "portable 64x64": 70.7},
    ((36, 83, 8, 6), 2669, "float16"): {"transposed": 182.2, "portable 128x128": 221.3},
    ((3, 237, 486, 33), 14, "float32"): {"transposed": 126.6, "portable 64x64": 140.8},
    ((15, 312, 340, 22), 44, "float16"): {"transposed": 142.3, "portable 64x64": 367.1},
}  # fmt: skip
FACTORS = 0.55, 1.6  # that an estimate may be off by, as few are
BY_BATCH_LAST = 0.74, 1.2  # the same of those by way of batch last


def of_rows(pattern, rows, dtype, **changes):
    return factor(*pattern, rows=rows, dtype=dtype, **changes)


def estimate(given, way: str) -> float:
    kind, _, tile = way.partition(" ")
    if kind == "portable":
        rows, columns = tile.split("x")
        return portable.microseconds(given, {"rows": rows, "columns": columns})
    known = choose.candidates(given, ARCH)
    choice = next(choice for choice in known if choice["kind"] == kind)
    module = via_batch_last if kind == "transposed" else interleaved
    return module.microseconds(given, choice)


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_fastest_kind_is_taken_and_estimates_are_near(case):
    given, measured = of_rows(*case), MEASURED[case]
    kinds = {way.partition(" ")[0]: time for way, time in measured.items()}
    assert kind_of(given) == min(kinds, key=kinds.get)
    for way, time in measured.items():
        low, high = BY_BATCH_LAST if way == "transposed" else FACTORS
        assert low * time < estimate(given, way) < high * time, way


def test_the_tile_is_the_fastest_one():
    """31.6, 33.7 and 36.2 us by the portable ones."""
    large = of_rows((10, 225, 61, 2), 1900, "float16")
    assert choose.default(large, PROCESSORS, ARCH) == {
        "kind": "portable", "rows": 128, "columns": 128,
    }  # fmt: skip
    few = of_rows((2, 55, 117, 3), 133, "float32")
    assert choose.default(few, PROCESSORS, ARCH)["rows"] == 64


def test_rows_count_as_they_are_and_what_leaves_l2_counts_more():
    """A batch of 9 is no whole tile of rows in what is moved; a large one is moved through memory,
    as its copies do not stay in L2."""
    few, rates = of_rows((3, 237, 486, 33), 9, "float32"), via_batch_last.RATES[4]
    more = estimate(few._replace(rows=12), "transposed") - estimate(few, "transposed")
    numbers = 3 * 33 * (237 + 486)
    assert more == pytest.approx(rates.byte * 3 * numbers * 4 / 1e6)
    small, large, larger = (
        estimate(of_rows((1, 64, 64, 6), rows, "float16"), "transposed")
        for rows in (10_000, 60_000, 110_000)
    )
    assert large - small < larger - large


def test_tf32_has_a_third_of_the_multiplications():
    given = of_rows((2, 96, 48, 4), 25088, "float32")
    for way in ("portable 128x64", "interleaved", "transposed"):
        exact, fast = (estimate(given._replace(precision=p), way) for p in ("fp32", "tf32"))
        assert fast < exact, way


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("rows", [1, 2, 63, 4096])
@pytest.mark.parametrize("pattern", [(1, 1, 1, 2), (1, 1, 9, 3), (5, 300, 1, 4), (2, 7, 1500, 65)])
def test_estimates_at_the_edges(pattern, rows, dtype, precision):
    given = of_rows(pattern, rows, dtype, precision=precision)
    assert times.knows(given)
    known = choose.candidates(given, ARCH)
    assert choose.default(given, PROCESSORS, ARCH) in known
    for choice in known:
        if choice["kind"] == "portable":
            assert portable.microseconds(given, choice) > 2
            assert portable.microseconds(given, choice, 8) >= portable.microseconds(given, choice)


def test_other_problems_are_chosen_by_other_rules():
    for given in (
        problem(),
        problem(lanes=3, left=Layout(9, 8, 1, 7), out=OutLayout(9, 8, 1, 7)),
        weight_gradient(2, 96, 48, 16, batch=100),
    ):
        assert not times.knows(given)
    odd = of_rows((11, 155, 21, 49), 638, "float16")
    assert kind_of(odd, "sm_80") == "portable"


# Large batches.

# Milliseconds on an H200, batch 25088: interleaved and transposed, in float16, TF32 and 3xTF32.
LARGE_BATCHES = {
    (1, 768, 192, 64): ((5.88, 2.71), (8.65, 5.21), (14.4, 8.13)),
    (4, 1024, 1024, 16): ((19.3, 9.16), (54.5, 17.4), (80.0, 44.3)),
    (3, 512, 512, 16): ((2.59, 2.48), (7.70, 4.63), (14.2, 8.75)),
    (1, 256, 256, 16): ((0.238, 0.345), (0.608, 0.704), (1.26, 0.989)),
    (3, 192, 192, 16): ((0.410, 0.821), (1.08, 1.49), (2.02, 1.86)),
    (8, 48, 48, 64): ((1.56, 2.16), (2.46, 3.83), (3.15, 4.29)),
    (16, 1024, 1024, 4): ((8.10, 8.79), (17.5, 17.5), (52.8, 41.4)),
    (1, 1024, 1024, 4): ((0.492, 0.544), (1.07, 1.15), (3.46, 2.47)),
    (1, 512, 512, 4): ((0.136, 0.209), (0.277, 0.412), (0.806, 0.716)),
    (2, 64, 64, 64): ((0.499, 0.732), (0.722, 1.28), (1.10, 1.46)),
    (4, 192, 48, 16): ((0.233, 0.651), (0.611, 1.32), (1.13, 1.39)),
}
OF_LARGE_BATCHES = {
    (pattern, *numbers): measured
    for pattern, of_pattern in LARGE_BATCHES.items()
    for numbers, measured in zip((HALF, TF32, FP32), of_pattern, strict=True)
}


@pytest.mark.parametrize("case", OF_LARGE_BATCHES, ids=str)
def test_large_batches_go_where_they_were_measured_to_be_faster_and_the_model_is_near(case):
    (pattern, dtype, precision), (of_interleaved, of_transposed) = case, OF_LARGE_BATCHES[case]
    given = factor(*pattern, dtype=dtype, precision=precision)
    model, first = via_batch_last.seconds(given), kinds_of(given)[0]
    assert 0.5e-3 * of_interleaved <= model[0] <= 1.15e-3 * of_interleaved
    assert 0.84e-3 * of_transposed <= model[1] <= 1.1e-3 * of_transposed
    assert {first} | {"transposed", "interleaved"} == {"transposed", "interleaved"}
    if of_interleaved > 1.25 * of_transposed:
        assert first == "transposed"
    if of_interleaved < 1.05 * of_transposed:
        assert first == "interleaved"


@pytest.mark.parametrize("pattern", [(1, 768, 192, 64), (4, 1024, 1024, 16)], ids=str)
def test_gradients_by_x_and_other_half_types_go_the_same_way(pattern):
    for given in (factor(*pattern), by_x(*pattern), factor(*pattern, dtype="bfloat16")):
        assert kinds_of(given) == ["transposed", "interleaved", "portable"]


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_small_batches_are_not_worth_further_launches(dtype, precision):
    """Nor is `portable` for large weights, of which it reads each l by itself."""
    options = {"dtype": dtype, "precision": precision}
    for rows in (1, 8):
        assert kinds_of(factor(1, 64, 64, 64, rows=rows, **options))[0] == "portable"
    for rows in (1, 8, 64):
        assert kinds_of(factor(1, 768, 192, 64, rows=rows, **options))[0] == "interleaved"
    assert kinds_of(factor(1, 768, 192, 64, rows=8192, **options))[0] == "transposed"


def test_much_scratch_wants_a_clear_gain():
    """A factor (4, 40, 40, 6) is estimated to be 6 to 10 % faster by way of batch last, where 1500
    rows take 11.5 MB of it, 6000 take 46 MB and 12000 take 92 MB. A million rows of (2, 3, 5, 3)
    would take 192 MB."""

    def kind(pattern, rows):
        return kind_of(factor(*pattern, rows=rows, dtype="float32"))

    assert kind((4, 40, 40, 6), 1500) == "transposed"
    assert kind((4, 40, 40, 6), 6000) == kind((4, 40, 40, 6), 12000) == "portable"
    assert kind((2, 3, 5, 3), 1_000_000) == "portable"
    assert kind((2, 70, 68, 23), 2000) == "transposed"  # by far


# Small batches, for which portable kernels ask for no packed weight.

# Microseconds on an H200 by the kind for large batches and by `portable`: pattern, batch last,
# rows, numbers.
SMALL_BATCHES = {
    ((6, 64, 64, 1), False, 64, HALF): (3.8, 3.6),
    ((1, 768, 192, 2), False, 64, HALF): (9.0, 8.6),
    ((1, 768, 192, 2), False, 1024, HALF): (9.7, 12.3),
    ((4, 192, 48, 16), False, 16, HALF): (9.2, 8.1),
    ((4, 192, 48, 16), False, 64, HALF): (9.3, 14.8),
    ((1, 256, 256, 16), False, 64, HALF): (14.6, 20.9),
    ((4, 128, 128, 4), False, 64, HALF): (9.2, 7.1),
    ((1, 512, 512, 4), False, 64, HALF): (15.8, 19.0),
    ((1, 64, 64, 64), False, 8, HALF): (9.9, 7.6),
    ((4, 192, 48, 16), True, 64, HALF): (8.4, 6.5),
    ((4, 192, 48, 16), True, 256, HALF): (9.6, 13.4),
    ((1, 256, 256, 16), True, 64, HALF): (11.3, 13.0),
    ((1, 512, 512, 4), True, 8, HALF): (12.0, 15.8),
    ((1, 768, 192, 2), False, 128, FP32): (16.5, 10.9),
    ((1, 256, 256, 16), False, 16, FP32): (29.3, 16.6),
    ((4, 192, 48, 16), False, 128, FP32): (14.6, 30.1),
    ((1, 512, 512, 4), False, 128, FP32): (38.7, 25.1),
    ((1, 512, 512, 4), False, 1024, FP32): (40.7, 64.8),
    ((4, 192, 48, 16), True, 128, FP32): (11.2, 10.8),
    ((4, 192, 48, 16), True, 256, FP32): (14.3, 16.6),
    ((1, 512, 512, 4), True, 128, TF32): (21.1, 14.6),
    ((1, 64, 64, 64), False, 64, TF32): (16.0, 14.2),
    ((1, 64, 64, 64), False, 256, TF32): (16.5, 32.4),
    ((1, 48, 48, 2), False, 128, TF32): (6.9, 4.0),
}


@pytest.mark.parametrize("case", SMALL_BATCHES, ids=str)
def test_small_batches_go_where_they_were_measured_to_be_faster(case):
    (pattern, last, rows, (dtype, precision)), (large, small) = case, SMALL_BATCHES[case]
    kind = kind_of(factor(*pattern, last, rows=rows, dtype=dtype, precision=precision))
    if small > 1.02 * large:
        assert kind != "portable"
    if large > 1.15 * small:
        assert kind == "portable"


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_every_kind_stays_for_tuning_to_find(dtype, precision):
    given = factor(2, 40, 24, 4, rows=8, dtype=dtype, precision=precision)
    kinds = kinds_of(given)
    assert kinds[0] == "portable" and {"interleaved", "portable"} <= set(kinds)
    assert entries(choose.lower((), given, ARCH, PROCESSORS))[-1] != "pack"


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_a_long_depth_is_not_small(dtype, precision):
    """Portable kernels sum it in parts, by two launches; gradients of weights are such."""
    options = {"dtype": dtype, "precision": precision}
    for last in (False, True):
        for batch in (1024, 8192, 25088):
            given = weight_gradient(1, 128, 512, 4, batch=batch, last=last, **options)
            assert not is_small(given)
    assert not is_small(problem(lanes=4, rows=8, depth=1024, **options))
