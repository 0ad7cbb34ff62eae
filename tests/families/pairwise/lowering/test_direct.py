"""Lowering of pairwise calls: which kernel, which grid, which bytes of parameters."""

import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import exp_power_sum
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering import problem as lowering
from kernlib.families.pairwise.lowering.problem import Call, Layout, Problem, Scope
from kernlib.jit import sources, targets
from kernlib.lowering import dtypes, kernel
from kernlib.lowering.kernel import Gpu
from tests.support.kernels import only

L1, LAPLACE, NORM = kl.l1_distance(), kl.laplace_l1(), kl.p_distance()
SIGNED = kl.Pairwise(inner=kl.Identity())
SYMMETRIC = kl.laplace_l1(symmetric=True)


def problem(m=1000, n=2000, k=64, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    fields = {
        "a": Layout(m * k, k, 1),
        "b": Layout(n * k, k, 1),
        "out": Layout(m * n, n, 1),
    }
    return Problem(m, n, k, batch, **(fields | changes))


def lowered(descriptor=L1, arch="sm_90a", processors=132, **changes):
    strides = (0,) * lowering.scalar_count(descriptor)
    return lower(descriptor, problem(**changes), arch, processors, strides)


def lower(descriptor, given, arch, processors, strides, choice=None):
    call, gpu = Call(descriptor, given, strides), Gpu(arch, processors)
    option = kernel.choose((DIRECT,), call, gpu, {"kind": "direct", **(choice or {})})
    return only(DIRECT.launch(descriptor, call, gpu, option.knobs))


def candidates(given, arch):
    return DIRECT.choices(Call(L1, given), arch)


def variants(descriptor, arch, dtypes):
    return DIRECT.specs(descriptor, Scope(dtypes, arch), arch)


def access(found):
    return re.findall(r"ACCESS_[AB] = Access::(\w+)", found.spec.source)


def constant(found, name):
    return re.search(rf"constexpr \w+ {name} = (\w+);", found.spec.source)[1]


CHOICES = [  # dtype, layout of a (1000 points of 64 features), the access that is right for it
    ("float32", Layout(0, 64, 1), "features"),
    ("float32", Layout(0, 1, 1000), "points"),
    ("float32", Layout(0, 68, 1), "features"),  # padded by whole runs
    ("float32", Layout(0, 65, 1), "strided"),
    ("float32", Layout(0, 1, 1002), "strided"),
    ("float32", Layout(0, 128, 2), "strided"),
    ("float32", Layout(0, 0, 1), "features"),  # one point, expanded
    ("float32", Layout(0, 64, 0), "strided"),
    ("float32", Layout(64000, 64, 1), "features"),
    ("float32", Layout(64002, 64, 1), "strided"),  # later entries of the batch are not aligned
    ("float32", Layout(0, 64, 1, alignment=4), "strided"),
    ("float32", Layout(0, 64, 1, alignment=8), "strided"),
    ("float32", Layout(0, 64, 1, alignment=0), "features"),  # of the address modulo 16
    ("float64", Layout(0, 64, 1), "features"),
    ("float64", Layout(0, 66, 1), "features"),
    ("float64", Layout(0, 65, 1), "strided"),
    ("float64", Layout(0, 64, 1, alignment=8), "strided"),
    ("float16", Layout(0, 64, 1, alignment=8), "features"),
    ("float16", Layout(0, 64, 1, alignment=4), "strided"),
    ("float16", Layout(0, 66, 1), "strided"),
    ("bfloat16", Layout(0, 1, 1000, alignment=8), "points"),
]


@pytest.mark.parametrize(("dtype", "layout", "expected"), CHOICES)
def test_wide_loads_are_chosen_only_where_every_one_is_aligned(dtype, layout, expected):
    changes = {"dtype": dtype, "out_dtype": dtype}
    assert access(lowered(a=layout, **changes))[0] == expected
    assert access(lowered(m=2000, n=1000, b=layout, **changes))[1] == expected


@pytest.mark.parametrize(("k", "n"), [(63, 2000), (64, 2001)])
def test_a_last_run_that_is_cut_short_forbids_wide_loads(k, n):
    rows = lowered(k=k, n=n, b=Layout(0, 64, 1))
    columns = lowered(k=k, n=n, b=Layout(0, 1, 2004))
    assert access(rows)[1] == ("strided" if k == 63 else "features")
    assert access(columns)[1] == ("strided" if n == 2001 else "points")


def fixed(found):
    """What is packed behind the hyperparameters' strides: views, sizes and flags."""
    return struct.unpack_from("<13q5i", found.fixed, 8 * found.scalars)


@pytest.mark.parametrize("descriptor", [L1, SIGNED, kl.dot_product()], ids=["l1", "signed", "dot"])
def test_a_column_major_out_is_filled_as_the_transposed_call(descriptor):
    a, b = Layout(9, 64, 1), Layout(7, 1, 2000)
    found = lowered(descriptor, a=a, b=b, out=Layout(5, 1, 1000), diagonal=3)
    direct = lowered(descriptor, a=a, b=b, diagonal=3)
    names = [[name for name, _ in each.pointers] for each in (found, direct)]
    assert names == [["b", "a", "out"], ["a", "b", "out"]]
    assert access(found) == access(direct)[::-1]
    views, sizes = fixed(found)[:9], fixed(found)[9:13]
    assert views == (7, 1, 2000, 9, 64, 1, 5, 1000, 1) and sizes == (2000, 1000, 1, -3)
    assert ("SwappedDifference" in found.spec.source) == (descriptor is SIGNED)
    assert "Swapped" not in direct.spec.source


def test_both_orders_of_a_symmetric_form_share_a_kernel():
    row = lowered(b=Layout(0, 64, 1))
    column = lowered(b=Layout(0, 64, 1), out=Layout(0, 1, 1000))
    assert row.spec == column.spec


TILES = [  # m, n, batch, dtype, tile
    (30000, 30000, 1, "float32", 128),
    (1500, 1500, 1, "float32", 64),  # 144 big tiles for 132 multiprocessors, or 576 small ones
    (1400, 1400, 1, "float32", 128),  # 121
    (1000, 1000, 1, "float32", 64),  # 64, or 256
    (1400, 1400, 2, "float32", 128),
    (64, 10**6, 1, "float32", 64),
    (10**6, 64, 1, "float16", 64),
    (65, 10**6, 1, "bfloat16", 128),
    (30000, 30000, 1, "float64", 64),
]


@pytest.mark.parametrize(("m", "n", "batch", "dtype", "tile"), TILES)
def test_the_tile_fills_the_device(m, n, batch, dtype, tile):
    found = lowered(m=m, n=n, batch=batch, dtype=dtype, out_dtype=dtype)
    assert constant(found, "TILE") == str(tile)
    assert found.grid == (-(-m // tile) * -(-n // tile), batch)


@pytest.mark.parametrize(("k", "long"), [(0, "false"), (64, "false"), (65, "true")])
def test_running_sums_are_kept_apart_only_for_long_rows(k, long):
    assert constant(lowered(k=k), "LONG_K") == long


def test_sizes_up_to_the_grids_limit_are_taken_and_larger_ones_refused():
    side = 46340  # tiles; its square is just below 2^31
    assert lowered(m=side * 128, n=side * 128).grid[0] == side**2
    with pytest.raises(UnsupportedError, match=f"{46341 * 128} x {46341 * 128} .*slices"):
        lowered(m=46341 * 128, n=46341 * 128)
    assert lowered(batch=10**6, m=9, n=9).grid == (1, lowering.MAX_BATCH_BLOCKS)
    with pytest.raises(UnsupportedError, match="features"):
        lowered(k=2**31 - 16)


ARCHS = list(targets.SHARED_BYTES)
DTYPES = list(dtypes.DTYPES)


REPRESENTATIVE = {
    "l1": L1,
    "laplace": LAPLACE,
    "signed": SIGNED,
    "symmetric": SYMMETRIC,
    "norm": NORM,
    "both": kl.Pairwise(inner=kl.Power(), outer=kl.Power()),
    "outer": kl.Pairwise(inner=kl.Sqrt(), outer=kl.Power(), epilogue=kl.Gaussian()),
    "polynomial": kl.polynomial(2),
    "exponentials": exp_power_sum(epilogue=kl.Scale()),
    "logarithms": kl.Pairwise(inner=norms.PowerLog()),
}


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_variant_fits_every_target_and_has_a_description_of_its_own(name):
    for arch in ARCHS:
        specs = variants(REPRESENTATIVE[name], arch, tuple(DTYPES))
        assert len({spec.source for spec in specs}) == len(specs) > 100
        assert len({spec.description for spec in specs}) == len(specs)
        assert max(spec.shared_bytes for spec in specs) <= targets.SHARED_BYTES[arch]
        assert max(spec.threads for spec in specs) <= targets.RESIDENT_THREADS[arch]


def test_a_target_with_too_little_shared_memory_is_refused(monkeypatch):
    monkeypatch.setitem(targets.SHARED_BYTES, "sm_86", 10_000)
    with pytest.raises(
        UnsupportedError, match="bytes of shared memory, a block of sm_86 has 10000"
    ):
        lowered(arch="sm_86")
    with pytest.raises(UnsupportedError, match="bytes of shared memory"):
        variants(L1, "sm_86", ("float32",))


def test_where_the_big_tile_does_not_fit_the_small_one_is_taken(monkeypatch):
    monkeypatch.setitem(targets.SHARED_BYTES, "sm_86", 98 * 1024)
    found = lowered(m=30000, n=30000, k=1024, arch="sm_86")
    assert constant(found, "TILE") == "64"
    assert candidates(problem(k=1024), "sm_86") == [{"tile": 64}]
    assert constant(lowered(m=30000, n=30000, k=64, arch="sm_86"), "TILE") == "128"
    for spec in variants(L1, "sm_86", ("float32",)):
        assert spec.shared_bytes <= 98 * 1024
        assert "tile=64" in spec.description or "long" not in spec.description


# Choices that tuning makes.

CANDIDATES = [  # changes of a 1000 x 2000 problem, tiles to choose from
    ({}, [128, 64]),
    ({"dtype": "bfloat16", "batch": 7}, [128, 64]),
    ({"m": 65, "n": 65}, [128, 64]),
    ({"m": 64}, [64]),
    ({"n": 1}, [64]),
    ({"dtype": "float64", "out_dtype": "float64"}, [64]),
]


@pytest.mark.parametrize(("changes", "tiles"), CANDIDATES)
def test_tuning_may_choose_any_tile_that_the_problem_fills(changes, tiles):
    given = problem(**changes)
    assert candidates(given, "sm_90a") == [{"tile": tile} for tile in tiles]
    strides = (0,) * lowering.scalar_count(L1)
    for tile in tiles:
        for value in (tile, str(tile)):
            found = lower(L1, given, "sm_90a", 132, strides, {"tile": value})
            assert constant(found, "TILE") == str(tile)
            assert found.grid[0] == -(-given.m // tile) * -(-given.n // tile)
            assert found.spec in variants(L1, "sm_90a", (given.dtype,))


@pytest.mark.parametrize("choice", [None, {}, {"tile": 32}, {"tile": "big"}, {"tile": 64, "x": 1}])
def test_a_choice_that_is_no_candidate_is_passed_over(choice):
    strides = (0,) * lowering.scalar_count(L1)
    thin = lower(L1, problem(m=64), "sm_90a", 132, strides)
    assert lower(L1, problem(m=64), "sm_90a", 132, strides, {"tile": 128}) == thin
    for call in (problem(m=9000), problem(m=200)):
        untuned = lower(L1, call, "sm_90a", 132, strides)
        assert lower(L1, call, "sm_90a", 132, strides, choice) == untuned


def shared_bytes(tile, long_k, accumulator):
    """As tile.cuh lays them out: two stages of two operands, and the sums beside or over them."""
    line = (tile + 16 // accumulator) * accumulator
    stages, total = 2 * 2 * 16 * line, tile * line
    return stages + total if long_k else max(stages, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [64, 1024])
@pytest.mark.parametrize("m", [100, 30000])
def test_shared_memory_is_what_the_source_uses(dtype, k, m):
    found = lowered(m=m, n=m, k=k, dtype=dtype, out_dtype=dtype)
    size = 8 if dtype == "float64" else 4
    assert found.spec.shared_bytes == shared_bytes(int(constant(found, "TILE")), k > 128, size)


VECTORS = [
    ("float32", Layout(0, 2000, 1), 1),
    ("float32", Layout(0, 2004, 1), 1),
    ("float32", Layout(0, 2001, 1), 0),
    ("float32", Layout(0, 2000, 1, alignment=8), 0),
    ("float32", Layout(6, 2000, 1), 0),
    ("float32", Layout(0, 4000, 2), 0),
    ("float16", Layout(0, 2000, 1, alignment=8), 1),
    ("float16", Layout(0, 2000, 1, alignment=4), 0),
    ("float64", Layout(0, 2002, 1), 1),
    ("float64", Layout(0, 2000, 1, alignment=8), 0),
]


@pytest.mark.parametrize(("dtype", "out", "expected"), VECTORS)
def test_wide_stores_are_chosen_only_where_every_one_is_aligned(dtype, out, expected):
    assert fixed(lowered(out=out, dtype=dtype, out_dtype=dtype))[16] == expected


# The generated source.


@pytest.mark.parametrize(
    ("inner", "code"),
    [
        (0.0, "ExpPowerOnDevice"), (1.0, "ExpPower1"), (2.0, "ExpPower2"),
        ("any", "ExpPower"), ("device", "ExpPowerOnDevice"),
    ],
)  # fmt: skip
def test_the_code_of_exponentials_follows_the_exponent(inner, code):
    found = lowered(exp_power_sum(), inner=inner)
    assert f"using Inner = {code};" in found.spec.source
    assert "using Inner = PowerLog;" in lowered(kl.Pairwise(inner=norms.PowerLog())).spec.source


def test_a_descriptor_without_tensor_cores_has_the_same_source():
    assert lowered(L1.replace(direct=True)).spec.source == lowered(L1).spec.source


def test_sizes_and_numbers_do_not_reach_the_source():
    small, large = lowered(m=2000, n=2000), lowered(m=30000, n=40000, k=60, diagonal=5)
    assert small.spec == large.spec
    assert small.spec.canonical() == large.spec.canonical()


@pytest.mark.parametrize("descriptor", [L1, kl.laplace_pq(), kl.matern52(), kl.polynomial(7)])
def test_the_source_is_the_same_each_time_and_includes_only_our_files(descriptor):
    found = lowered(descriptor)
    assert lowered(descriptor.replace()).spec == found.spec
    assert not sources.system_includes(found.spec.source)
    names = sources.closure(found.spec.source)
    assert {"pairwise/direct/direct.cuh", "pairwise/tile.cuh", "common/math.cuh"} <= set(names)
    assert all(name.split("/")[0] in ("pairwise", "common") for name in names)


# variants() is what lower() can choose.

ALIGNMENTS = st.sampled_from([0, 2, 4, 8, 12])
STRIDES = st.sampled_from([0, 1, 2, 3, 64, 65, 66, 1000])
LAYOUTS = st.builds(Layout, STRIDES, STRIDES, STRIDES, ALIGNMENTS)
SIZES = st.integers(1, 5000)
DESCRIPTORS = [L1, LAPLACE, SIGNED, SYMMETRIC, NORM, kl.power_sum(), kl.polynomial(2)]
KNOWN = {}


def known(descriptor, arch):
    if (descriptor, arch) not in KNOWN:
        KNOWN[descriptor, arch] = set(variants(descriptor, arch, tuple(DTYPES)))
    return KNOWN[descriptor, arch]


@pytest.mark.few(0)
@settings(max_examples=300)
@given(
    st.sampled_from(DESCRIPTORS), st.sampled_from(["sm_80", "sm_86", "sm_90a"]), st.data(),
    SIZES, SIZES, st.integers(0, 300), st.integers(1, 70000), st.sampled_from(DTYPES),
)  # fmt: skip
def test_lowering_chooses_among_the_variants(descriptor, arch, data, m, n, k, batch, dtype):
    a, b, out = (data.draw(LAYOUTS) for _ in range(3))
    inner = data.draw(st.sampled_from(list(lowering.inner_codes(descriptor))))
    out_dtype = data.draw(st.sampled_from([dtype, dtypes.DTYPES[dtype].accumulator]))
    given = Problem(
        m, n, k, batch, a, a if descriptor.symmetric else b, out, dtype, out_dtype,
        inner=inner, root=isinstance(descriptor.outer, kl.Root),
    )  # fmt: skip
    choice = data.draw(st.sampled_from([None, *candidates(given, arch)]))
    strides = (0,) * lowering.scalar_count(descriptor)
    assert lower(descriptor, given, arch, 100, strides, choice).spec in known(descriptor, arch)


@pytest.mark.parametrize(
    ("inner", "codes"),
    [(kl.Power(), {"inner": 2.0, "root": True}),
     *((kl.Abs(), {"outer": outer}) for outer in (0.5, 1.0, 2.0, "any"))],
)  # fmt: skip
def test_exponents_of_the_outer_stage_are_among_the_variants(inner, codes):
    descriptor = kl.Pairwise(inner=inner, outer=kl.Power())
    specs = variants(descriptor, "sm_90a", ("float32",))
    assert lowered(descriptor, **codes).spec in specs


def test_a_device_later_than_the_table_has_a_clear_error():
    with pytest.raises(UnsupportedError, match="sm_130"):
        targets.arch_of((13, 0))
