"""Lowering of pairwise calls: which kernel, which grid, which bytes of parameters."""

import ctypes
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import exp_power_sum
from kernlib.families.pairwise.lowering import direct as lowering
from kernlib.families.pairwise.lowering.direct import Problem
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.jit import sources, targets
from kernlib.lowering import dtypes
from kernlib.lowering.steps import NUMBER
from tests.families.pairwise.lowering.structs import parameters_type
from tests.support.kernels import only

SOURCE = "direct/direct.cuh"

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


def lower(*arguments):
    return only(lowering.lower(*arguments))


def access(found):
    return re.findall(r"#define ACCESS_[AB] Access::(\w+)", found.spec.source)


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


def read(found, descriptor=L1, scalar_strides=None):
    return parameters_type(SOURCE, lowering.scalar_count(descriptor)).from_buffer_copy(
        block(found, descriptor)
    )


@pytest.mark.parametrize("descriptor", [L1, SIGNED, kl.dot_product()], ids=["l1", "signed", "dot"])
def test_a_column_major_out_is_filled_as_the_transposed_call(descriptor):
    a, b = Layout(9, 64, 1), Layout(7, 1, 2000)
    found = lowered(descriptor, a=a, b=b, out=Layout(5, 1, 1000), diagonal=3)
    direct = lowered(descriptor, a=a, b=b, diagonal=3)
    parameters = read(found, descriptor)
    names = [[name for name, _ in each.pointers] for each in (found, direct)]
    assert names == [["b", "a", "out"], ["a", "b", "out"]]
    assert access(found) == access(direct)[::-1]
    assert (parameters.m, parameters.n, parameters.diagonal) == (2000, 1000, -3)
    assert list(parameters.a_view) == [7, 1, 2000] and list(parameters.b_view) == [9, 64, 1]
    assert list(parameters.out_view) == [5, 1000, 1]
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
        specs = lowering.variants(REPRESENTATIVE[name], arch, tuple(DTYPES))
        assert len({spec.source for spec in specs}) == len(specs) > 100
        assert len({spec.description for spec in specs}) == len(specs)
        assert max(spec.shared_bytes for spec in specs) <= targets.SHARED_BYTES[arch]
        assert max(spec.threads for spec in specs) <= targets.RESIDENT_THREADS[arch]


BOTH = REPRESENTATIVE["both"]
DESCRIBED = [  # what is shown only where it says something
    (L1, {}, "float32 tile=128 features/features"),
    (L1, {"dtype": "float16", "out_dtype": "float16"}, "float16 tile=128 features/features"),
    (L1, {"dtype": "float16"}, "float16->float32 tile=128 features/features"),
    (L1, {"b": Layout(0, 1, 2000), "m": 9000}, "float32 tile=128 features/points"),
    (SIGNED, {"out": Layout(0, 1, 1000), "k": 200}, "float32 tile=128 {} long swapped"),
    (NORM, {"inner": 2.0, "root": True}, "float32 tile=128 {} p=2.0"),
    (BOTH, {"inner": 3.0, "outer": 0.5}, "float32 tile=128 {} p=3.0 outer=sqrt(s)"),
    (BOTH, {"inner": 2.0, "root": True}, "float32 tile=128 {} p=2.0 outer=sqrt(s)"),
    (
        BOTH,
        {"inner": "device", "root": True},
        "float32 tile=128 {} p=device outer=any_root(s,exponent,rest) norm",
    ),
    (BOTH, {}, "float32 tile=128 {} outer=power(s,exponent)"),
]


@pytest.mark.parametrize(("descriptor", "changes", "expected"), DESCRIBED)
def test_a_description_says_what_the_variant_is(descriptor, changes, expected):
    described = lowered(descriptor, **changes).spec.description
    assert described == f"{descriptor.describe()} {expected.format('features/features')}"


def test_a_target_with_too_little_shared_memory_is_refused(monkeypatch):
    monkeypatch.setitem(targets.SHARED_BYTES, "sm_86", 10_000)
    with pytest.raises(
        UnsupportedError, match="bytes of shared memory, a block of sm_86 has 10000"
    ):
        lowered(arch="sm_86")
    with pytest.raises(UnsupportedError, match="bytes of shared memory"):
        lowering.variants(L1, "sm_86", ("float32",))


def test_where_the_big_tile_does_not_fit_the_small_one_is_taken(monkeypatch):
    monkeypatch.setitem(targets.SHARED_BYTES, "sm_86", 98 * 1024)
    found = lowered(m=30000, n=30000, k=1024, arch="sm_86")
    assert constant(found, "TILE") == "64"
    assert lowering.candidates(problem(k=1024), "sm_86") == [{"tile": 64}]
    assert constant(lowered(m=30000, n=30000, k=64, arch="sm_86"), "TILE") == "128"
    for spec in lowering.variants(L1, "sm_86", ("float32",)):
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
    assert lowering.candidates(given, "sm_90a") == [{"tile": tile} for tile in tiles]
    strides = (0,) * lowering.scalar_count(L1)
    for tile in tiles:
        for value in (tile, str(tile)):
            found = lower(L1, given, "sm_90a", 132, strides, {"tile": value})
            assert constant(found, "TILE") == str(tile)
            assert found.grid[0] == -(-given.m // tile) * -(-given.n // tile)
            assert found.spec in lowering.variants(L1, "sm_90a", (given.dtype,))


@pytest.mark.parametrize("choice", [None, {}, {"tile": 32}, {"tile": "big"}, {"tile": 64, "x": 1}])
def test_a_choice_that_is_no_candidate_is_passed_over(choice):
    strides = (0,) * lowering.scalar_count(L1)
    for call in (problem(m=9000), problem(m=200)):
        untuned = lower(L1, call, "sm_90a", 132, strides)
        assert lower(L1, call, "sm_90a", 132, strides, choice) == untuned


def test_a_choice_does_not_outlive_the_problem_it_was_made_for():
    strides = (0,) * lowering.scalar_count(L1)
    thin = problem(m=64)
    found = lower(L1, thin, "sm_90a", 132, strides, {"tile": 128})
    assert found == lower(L1, thin, "sm_90a", 132, strides)


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


# The parameter block, against the struct of the CUDA source.


def block(found, descriptor, pointers=(1, 2, 3), numbers=None):
    count = lowering.scalar_count(descriptor)
    numbers = [0.0, 0] * count if numbers is None else numbers
    layout = f"<{len(lowering.OPERANDS)}Q" + NUMBER * count
    return struct.pack(layout, *pointers, *numbers) + found.fixed


@pytest.mark.parametrize("descriptor", [L1, LAPLACE, kl.laplace_pq(), SYMMETRIC], ids=str)
def test_the_parameter_block_is_the_struct_of_the_source(descriptor):
    count = lowering.scalar_count(descriptor)
    given = problem(
        m=1001, n=2002, k=303, batch=5,
        a=Layout(11, 12, 13), b=Layout(2**40, 22, 23), out=Layout(31, 2**33, 1),
        diagonal=-(2**35), accumulate=True,
    )  # fmt: skip
    strides = tuple(range(70, 70 + count))
    found = lower(descriptor, given, "sm_90a", 132, strides)
    numbers = [x for index in range(count) for x in (index + 0.5, index + 900)]
    data = block(found, descriptor, (2**47 + 1, 2**47 + 2, 2**47 + 3), numbers)
    kind = parameters_type(SOURCE, count)
    assert ctypes.sizeof(kind) == len(data)
    read = kind.from_buffer_copy(data)
    assert (read.a, read.b, read.out) == (2**47 + 1, 2**47 + 2, 2**47 + 3)
    assert [(s.value, s.device) for s in read.scalars] == [
        (index + 0.5, index + 900) for index in range(count)
    ]
    assert tuple(read.scalar_strides) == strides
    assert list(read.a_view) == [11, 12, 13] and list(read.b_view) == [2**40, 22, 23]
    assert list(read.out_view) == [31, 2**33, 1]
    assert (read.m, read.n, read.batch, read.diagonal) == (1001, 2002, 5, -(2**35))
    tile = int(constant(found, "TILE"))
    assert (read.k, read.tiles_m, read.tiles_n) == (303, -(-1001 // tile), -(-2002 // tile))
    assert (read.out_vectors, read.accumulate) == (0, 1)


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
    assert read(lowered(out=out, dtype=dtype, out_dtype=dtype)).out_vectors == expected


# The generated source.


def test_the_names_of_scalars_are_the_enum_of_the_source():
    text = (sources.root() / "pairwise" / "scalars.cuh").read_text()
    names = re.search(r"enum \{ (.*) \};", text)[1].lower().split(", ")
    assert names == [*lowering.COMMON_SCALARS, "epilogue"]


def test_tile_constants_agree_with_the_source():
    text = "".join(sources.read(f"pairwise/{n}.cuh") for n in ("operand", "tile"))
    for name in ("TILE_K", "THREADS", "PROMOTE_K"):
        assert re.search(rf"constexpr int {name} = (\d+);", text)[1] == str(getattr(lowering, name))


def test_every_term_that_lowering_names_is_defined():
    text = sources.read("pairwise/terms.cuh")
    defined = set(re.findall(r"^struct (\w+)", text, re.M))
    stages = {"Identity", "Abs", "Square", "Sqrt"}
    named = {code for codes in lowering.EXPONENT_STAGES.values() for code in codes.values()}
    assert named | stages <= defined
    assert {"Difference", "SwappedDifference", "Dot"} <= defined


@pytest.mark.parametrize(
    ("inner", "code"),
    [
        (0.0, "ExpPowerOnDevice"), (1.0, "ExpPower1"), (2.0, "ExpPower2"),
        ("any", "ExpPower"), ("device", "ExpPowerOnDevice"),
    ],
)  # fmt: skip
def test_the_code_of_exponentials_follows_the_exponent(inner, code):
    found = lowered(exp_power_sum(), inner=inner)
    assert f"#define INNER {code}\n" in found.spec.source
    assert "#define INNER PowerLog\n" in lowered(kl.Pairwise(inner=norms.PowerLog())).spec.source


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
        KNOWN[descriptor, arch] = set(lowering.variants(descriptor, arch, tuple(DTYPES)))
    return KNOWN[descriptor, arch]


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
    choice = data.draw(st.sampled_from([None, *lowering.candidates(given, arch)]))
    strides = (0,) * lowering.scalar_count(descriptor)
    assert lower(descriptor, given, arch, 100, strides, choice).spec in known(descriptor, arch)


@pytest.mark.parametrize("outer", [0.5, 1.0, 2.0, "any"])
def test_exponents_of_the_outer_stage_are_among_the_variants(outer):
    descriptor = kl.Pairwise(inner=kl.Abs(), outer=kl.Power())
    specs = lowering.variants(descriptor, "sm_90a", ("float32",))
    assert lowered(descriptor, outer=outer).spec in specs


def test_p_for_both_stages_is_among_the_variants():
    descriptor = kl.Pairwise(inner=kl.Power(), outer=kl.Power())
    specs = lowering.variants(descriptor, "sm_90a", ("float32",))
    assert lowered(descriptor, inner=2.0, root=True).spec in specs


def test_a_device_later_than_the_table_has_a_clear_error():
    with pytest.raises(UnsupportedError, match="sm_130"):
        targets.arch_of((13, 0))
