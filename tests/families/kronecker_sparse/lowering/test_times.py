"""Estimates of the kinds that take products batch first, d > 1, beside what was measured on an
H100, and which kind and tile are taken for them."""

import pytest

from kernlib.families.kronecker_sparse.lowering import choose, times
from kernlib.families.kronecker_sparse.lowering.choose import Layout, OutLayout
from tests.families.kronecker_sparse.lowering.cases import KINDS, problem, weight_gradient

ARCH, PROCESSORS = "sm_90a", 132
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


def factor(pattern, rows, dtype, **changes):
    a, b, c, d = pattern
    sizes = {"blocks": a, "columns": b, "depth": c, "lanes": d, "rows": rows}
    return problem(dtype=dtype, **(sizes | changes))


def estimate(given, way: str) -> float:
    kind, _, tile = way.partition(" ")
    if kind == "portable":
        rows, columns = tile.split("x")
        return times.of_portable(given, {"rows": rows, "columns": columns})
    known = choose.candidates(given, ARCH)
    choice = next(choice for choice in known if choice["kind"] == kind)
    of_kind = times.of_transposed if kind == "transposed" else times.of_interleaved
    return of_kind(given, choice)


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_the_fastest_kind_is_taken_and_estimates_are_near(case):
    given, measured = factor(*case), MEASURED[case]
    kinds = {way.partition(" ")[0]: time for way, time in measured.items()}
    assert choose.candidates(given, ARCH)[0]["kind"] == min(kinds, key=kinds.get)
    for way, time in measured.items():
        low, high = BY_BATCH_LAST if way == "transposed" else FACTORS
        assert low * time < estimate(given, way) < high * time, way


def test_the_tile_is_the_fastest_one():
    """31.6, 33.7 and 36.2 us by the portable ones."""
    large = factor((10, 225, 61, 2), 1900, "float16")
    assert choose.default(large, choose.candidates(large, ARCH), PROCESSORS) == {
        "kind": "portable", "rows": 128, "columns": 128,
    }  # fmt: skip
    few = factor((2, 55, 117, 3), 133, "float32")
    assert choose.default(few, choose.candidates(few, ARCH), PROCESSORS)["rows"] == 64


def test_rows_count_as_they_are_and_what_leaves_l2_counts_more():
    """A batch of 9 is no whole tile of rows in what is moved; a large one is moved through memory,
    as its copies do not stay in L2."""
    few, rates = factor((3, 237, 486, 33), 9, "float32"), times.TRANSPOSED[4]
    more = estimate(few._replace(rows=12), "transposed") - estimate(few, "transposed")
    numbers = 3 * 33 * (237 + 486)
    assert more == pytest.approx(rates.byte * 3 * numbers * 4 / 1e6)
    small, large, larger = (
        estimate(factor((1, 64, 64, 6), rows, "float16"), "transposed")
        for rows in (10_000, 60_000, 110_000)
    )
    assert large - small < larger - large


def test_reads_cost_more_the_further_apart_neighbours_read():
    """From a sector of 32 bytes, d = 8, to a line of 128, d = 32."""
    for dtype in ("float16", "float32"):
        times_of_numbers = [
            times.of_portable(factor((4, 64, 96, d), 8192, dtype), {"rows": 64, "columns": 64}) / d
            for d in (8, 9, 16, 31, 32, 64)
        ]
        grown = times_of_numbers[:5]
        assert grown == sorted(grown) and grown[-1] > 1.3 * grown[0], dtype
        assert times_of_numbers[-1] == pytest.approx(grown[-1], rel=0.02), dtype


def test_tf32_has_a_third_of_the_multiplications():
    given = factor((2, 96, 48, 4), 25088, "float32")
    for way in ("portable 128x64", "interleaved", "transposed"):
        exact, fast = (estimate(given._replace(precision=p), way) for p in ("fp32", "tf32"))
        assert fast < exact, way


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("rows", [1, 2, 63, 4096])
@pytest.mark.parametrize("pattern", [(1, 1, 1, 2), (1, 1, 9, 3), (5, 300, 1, 4), (2, 7, 1500, 65)])
def test_estimates_at_the_edges(pattern, rows, dtype, precision):
    given = factor(pattern, rows, dtype, precision=precision)
    assert times.knows(given)
    known = choose.candidates(given, ARCH)
    first = choose.default(given, known, PROCESSORS)
    assert first in known and first["kind"] == known[0]["kind"]
    for choice in known:
        if choice["kind"] == "portable":
            assert times.of_portable(given, choice) > 2
            assert times.of_portable(given, choice, 8) >= times.of_portable(given, choice)


def test_other_problems_are_chosen_by_other_rules():
    for given in (
        problem(),
        problem(lanes=3, left=Layout(9, 8, 1, 7), out=OutLayout(9, 8, 1, 7)),
        weight_gradient(2, 96, 48, 16, batch=100),
    ):
        assert not times.knows(given)
    odd = factor((11, 155, 21, 49), 638, "float16")
    assert choose.candidates(odd, "sm_80")[0]["kind"] == "portable"
