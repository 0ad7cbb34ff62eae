"""Pair gradients to kernels: which way, which code, which bytes; and what NVRTC makes of it."""

import struct
from itertools import product

import pytest

from kernlib.errors import CompileError
from kernlib.families.pairwise.gradients import primitive
from kernlib.families.pairwise.lowering import gradient as direct
from kernlib.families.pairwise.lowering import gradient_tensor as tensor
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.jit import targets
from kernlib.jit.compiler import compile_spec
from kernlib.lowering.steps import NUMBER
from tests.support.compiled_kernels import compiled
from tests.support.fakes import MODELS
from tests.support.kernels import only
from tests.support.speeds import one_of_each, slow_but

HERE = "sm_90a"
COUNT = MODELS[0][2]
HEAD = 8 * len(direct.OPERANDS) + struct.calcsize("<" + NUMBER * len(direct.SCALARS))


def problem(queries=100, points=300, features=40, sets=0, batch=1, **changed):
    made = direct.Problem(
        queries, points, features, sets, batch,
        x=Layout(0, features, 1), z=Layout(0, 1, points + -points % 4),
        weights=Layout(0, points, 1), coefficients=Layout(0, points, 1),
        out=direct.OutLayout(0, queries * features, features, 1),
        operation="Difference", slope="AbsSlope",
    )  # fmt: skip
    return made._replace(**changed)


LARGE = {"queries": 10000, "points": 10000, "features": 768}


@pytest.mark.parametrize(
    ("changed", "way"),
    [
        ({}, "direct"),
        (LARGE, "direct"),
        (LARGE | {"features": 64}, "tensor"),
        (LARGE | {"z": Layout(0, 768, 1)}, "tensor"),
        (LARGE | {"sets": 16}, "tensor"),
        (LARGE | {"slope": "PowerSlope"}, "direct"),
        (LARGE | {"slope": "PowerSlope", "sets": 2}, "direct"),
        (LARGE | {"slope": "PowerSlope", "sets": 16}, "tensor"),
        (LARGE | {"slope": "PowerSlope", "sets": 16, "dtype": "bfloat16"}, "tensor"),
        (LARGE | {"dtype": "float64"}, "direct"),
        (LARGE | {"slope": "SquareSlope"}, "products"),
        (LARGE | {"slope": "SquareSlope", "dtype": "float64"}, "direct"),
        ({"slope": "SquareSlope"}, "direct"),
        ({"operation": "Dot", "slope": "IdentitySlope"}, "products"),
        (LARGE | {"operation": "Dot", "slope": "SquareSlope"}, "direct"),
        (LARGE | {"operation": "SwappedDifference", "slope": "SqrtSlope", "sets": 3}, "direct"),
    ],
)
def test_the_way_of_a_problem(changed, way):
    assert primitive.rule(problem(**changed)) == way


@pytest.mark.parametrize(
    ("stage", "exponent", "plain", "slope"),
    [
        ("Abs", None, False, "AbsSlope"),
        ("Square", None, False, "SquareSlope"),
        ("Power", 0.0, False, "AbsSlope"),  # times p
        ("Power", 0.0, True, "SteepSlope"),
        ("Power", 0.3, True, "SteepSlope"),
        ("Power", 1.0, True, "AbsSlope"),
        ("Power", 1.3, True, "PowerSlope"),
        ("Power", 1.5, False, "ThreeHalvesSlope"),
        ("Power", 2.0, True, "SquareSlope"),
        ("Power", None, True, "DeviceSlope"),
        ("ExpPower", 1.0, False, "ExpAbsSlope"),
        ("ExpPower", 2.0, False, "ExpSquareSlope"),
        ("ExpPower", 0.7, False, "ExpPowerSlope"),
        ("ExpPower", None, False, "ExpPowerSlope"),
    ],
)
def test_the_slope_of_a_stage(stage, exponent, plain, slope):
    kind = direct.exponent_kind(exponent) if "Power" in stage else None
    assert direct.slope_of("difference", stage, kind, plain) == slope


def test_a_sign_of_products_is_no_comparison():
    assert direct.slope_of("dot", "Abs", None, False) == "AbsValueSlope"


@pytest.mark.parametrize(
    ("tiles", "points", "parts"), [(264, 10000, 1), (1, 200, 1), (1, 100000, 32), (132, 10000, 2)]
)
def test_points_are_parted_where_tiles_are_few(tiles, points, parts):
    assert direct.parts_of(tiles, points, 264) == parts


@pytest.mark.parametrize("points", [0, 1, 300, 5000, 100000])
@pytest.mark.parametrize("lower", [direct.lower, tensor.lower])
def test_parts_hold_all_points_and_none_is_empty(points, lower):
    made = lower(problem(points=points), HERE, COUNT)
    per_part = struct.unpack("<12i", only(made).fixed[-48:])[7]
    assert made.parts == struct.unpack("<12i", only(made).fixed[-48:])[6]
    assert (made.parts - 1) * per_part < max(points, 1) <= made.parts * per_part
    assert per_part % direct.TILE_K == 0
    assert only(made).grid[1] == made.parts


def test_partial_sums_go_to_a_workspace():
    made = direct.lower(problem(points=100000, sets=3, accumulate=True), HERE, COUNT)
    fields = struct.unpack("<3q12q5q3q3qd12i", only(made).fixed)
    assert made.parts > 1
    assert fields[15:20] == (3 * 4000, 4000, 40, 1, 3 * 4000)
    assert fields[-3] == 0  # accumulate


@pytest.mark.parametrize("sets", [0, 1, 2, 3, 4, 5, 16, 33])
def test_coefficients_fill_tiles(sets):
    made = direct.lower(problem(points=64, sets=sets), HERE, COUNT)
    tile = {0: 0, 1: 1, 2: 2}.get(sets, 4)
    assert f"constexpr int O_TILE = {tile};" in only(made).spec.source
    assert only(made).grid[1] == max(1, -(-sets // max(tile, 1)))


@pytest.mark.parametrize(
    ("layout", "access"),
    [
        (Layout(0, 300, 1), "features"),
        (Layout(0, 300, 1, 4), "strided"),
        (Layout(0, 301, 1), "strided"),
        (Layout(0, 1, 100), "points"),
        (Layout(0, 1, 101), "strided"),
        (Layout(2, 300, 1), "strided"),
        (Layout(0, 2, 600), "strided"),
    ],
)
def test_how_weights_are_read(layout, access):
    made = direct.lower(problem(weights=layout), HERE, COUNT)
    assert f"#define ACCESS_W Access::{access}\n" in only(made).spec.source


@pytest.mark.parametrize(
    ("out", "vectors"),
    [
        (direct.OutLayout(0, 4000, 40, 1), 1),
        (direct.OutLayout(0, 4000, 1, 100), 2),
        (direct.OutLayout(0, 4000, 1, 101), 0),
        (direct.OutLayout(0, 4000, 40, 1, 4), 0),
        (direct.OutLayout(0, 4001, 40, 1), 0),
    ],
)
def test_how_out_is_written(out, vectors):
    made = direct.lower(problem(points=64, sets=2, out=out), HERE, COUNT)
    assert struct.unpack("<12i", only(made).fixed[-48:])[8] == vectors


@pytest.mark.parametrize("features", [8, 16, 32, 64, 96, 100, 768])
@pytest.mark.parametrize("sets", [1, 8, 16, 40])
def test_tiles_of_tensor_cores_fit(features, sets):
    made = problem(features=features, sets=sets)
    for arch, limit in targets.SHARED_BYTES.items():
        tile = tensor.default(made, arch)
        assert tensor.shared_bytes(True, tensor.columns_of(made, arch), tile) <= limit
        assert tile.wgmma == (arch == HERE and features > tensor.NARROW and sets > 8)
    assert tensor.default(problem(features=8), HERE).features == 16


# What NVRTC makes of it.

# NVRTC 13.2 has no offsetof in constants. The compiler folds the comparisons; what remains of one
# that does not hold, ptxas refuses.
LAYOUT = """
static_assert(sizeof(Parameters) == {size}, "size");

template <typename Field>
__device__ void expect(Field& field, unsigned long long offset) {{
    if (reinterpret_cast<unsigned long long>(&field) != offset) asm volatile("misplaced;");
}}

extern "C" __global__ void layout() {{
    Parameters& at_zero = *static_cast<Parameters*>(nullptr);
    expect(at_zero.scalar_strides, {head});
    expect(at_zero.out_view, {out});
    expect(at_zero.points, {points});
}}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("lower", [direct.lower, tensor.lower])
def test_the_parameters_are_laid_out_as_the_kernel_reads_them(lower):
    made = lower(problem(), HERE, COUNT)
    size = HEAD + len(only(made).fixed)
    places = {"head": HEAD, "out": HEAD + 15 * 8, "points": size - 48}

    def build(**given):
        text = LAYOUT.format(size=size, **places | given)
        return compile_spec(only(made).spec._replace(source=only(made).spec.source + text), HERE)

    assert build().cubin[:4] == b"\x7fELF"
    with pytest.raises(CompileError, match="misplaced"):
        build(points=size - 44)


def matrix():
    """Name to (spec, arch): each slope, type, access and tile at least once."""
    cases = {}
    accesses = ("features", "points", "strided")
    for index, slope in enumerate(dict.fromkeys(direct.SLOPES)):
        for dtype in ("float32", "float64"):
            access = accesses[index % 3], accesses[(index + 1) % 3]
            made = direct.Variant(dtype, dtype, "Difference", slope, index % 2, *access)
            cases[f"{slope} {dtype}"] = (direct.spec(made, HERE), HERE)
    for tile in direct.O_TILES:
        for dtype in ("float32", "float64", "bfloat16"):
            made = direct.Variant(dtype, dtype, "Difference", "AbsSlope", tile, "points", "points")
            cases[f"sets {tile} {dtype}"] = (direct.spec(made, HERE), HERE)
    made = direct.Variant("float16", "float32", "Dot", "PowerSlope", 4, "strided", "features")
    cases["dot"] = (direct.spec(made, HERE), HERE)
    for arch in ("sm_80", "sm_86", "sm_120"):
        made = direct.Variant("float32", "float32", "Difference", "AbsSlope", 1, *accesses[:2])
        cases[f"{arch} direct"] = (direct.spec(made, arch), arch)
        for slope, columns in (("AbsSlope", 0), ("AbsSlope", 2), ("PowerSlope", 1)):
            sign = slope == tensor.SIGN
            tile = next(
                t for t in tensor.TILES[sign][columns]
                if tensor.shared_bytes(sign, columns, t) <= targets.SHARED_BYTES[arch]
            )  # fmt: skip
            made = tensor.Variant(slope, columns, tile)
            cases[f"{arch} tensor {slope} {columns}"] = (tensor.spec(made), arch)
    for sign, table in product((True, False), (tensor.TILES, tensor.WGMMA)):
        for columns, tile in ((c, t) for c, tiles in table[sign].items() for t in tiles):
            for slope in ("AbsSlope",) if sign else ("ThreeHalvesSlope", "DeviceSlope"):
                unit = "wgmma" if tile.wgmma else "mma"
                name = f"{unit} {slope} {columns} {tile.queries}x{tile.features}"
                cases[name] = (tensor.spec(tensor.Variant(slope, columns, tile)), HERE)
    return cases


CASES = matrix()
SPILL_BYTES = 224  # most before and behind the loops; one point's worth is 500 instructions
CUBIN_BYTES = 130 * 1000


FAST = one_of_each(lambda case: (*case[0].description.split()[:2], case[1] == HERE), CASES)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_a_kernel_compiles_within_its_bounds(name):
    spec, arch = CASES[name]
    made = compiled(spec, arch)
    assert made.entry.kernel == spec.entry and len(made.entry.cubin) <= CUBIN_BYTES
    assert made.spilled <= SPILL_BYTES
    blocks = 1 if "float64" in name or spec.threads > direct.THREADS else 2
    if arch == HERE:
        held = targets.resident_blocks(arch, spec.threads, made.registers, made.shared)
        assert held >= blocks


def test_every_choice_is_a_variant():
    known = {s.source for s in direct.variants("Difference", "AbsSlope", HERE, ("float32",))}
    known |= {s.source for s in tensor.variants("AbsSlope", HERE)}
    for sets, points in product((0, 1, 2, 7, 16, 40), (64, 100000)):
        for features, lower in product((16, 40, 768), (direct.lower, tensor.lower)):
            made = problem(points=points, sets=sets, features=features)
            assert only(lower(made, HERE, COUNT)).spec.source in known
