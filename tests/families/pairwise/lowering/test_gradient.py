"""Pair gradients to kernels: which way, which code, which bytes; and what NVRTC makes of it."""

import struct
from itertools import product

import pytest

from kernlib.families.pairwise.gradients import primitive
from kernlib.families.pairwise.kernels import gradient as direct
from kernlib.families.pairwise.kernels import gradient_tensor as tensor
from kernlib.families.pairwise.kernels.gradient import Gradient, Scope, Subject
from kernlib.families.pairwise.lowering import gradient as lowering
from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu, choose
from tests.support.compiled_kernels import compiled
from tests.support.fakes import MODELS
from tests.support.kernels import only
from tests.support.speeds import one_of_each, slow_but

HERE = "sm_90a"
COUNT = MODELS[0][2]


def problem(queries=100, points=300, features=40, sets=0, batch=1, **changed):
    made = lowering.Problem(
        queries, points, features, sets, batch,
        x=Layout(0, features, 1), z=Layout(0, 1, points + -points % 4),
        weights=Layout(0, points, 1), coefficients=Layout(0, points, 1),
        out=lowering.OutLayout(0, queries * features, features, 1),
        operation="Difference", slope="AbsSlope",
    )  # fmt: skip
    return made._replace(**changed)


def on_lanes(made):
    gpu = Gpu(HERE, COUNT)
    return Gradient().launch(Subject(made.operation, made.slope), made, gpu, {})


def by_tensor_cores(made):
    option = choose(tensor.KERNELS, made, Gpu(HERE, COUNT))
    subject = Subject(made.operation, made.slope)
    return option.kernel.launch(subject, made, Gpu(HERE, COUNT), option.knobs)


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
    kind = lowering.exponent_kind(exponent) if "Power" in stage else None
    assert lowering.slope_of("difference", stage, kind, plain) == slope


def test_a_sign_of_products_is_no_comparison():
    assert lowering.slope_of("dot", "Abs", None, False) == "AbsValueSlope"


@pytest.mark.parametrize(
    ("tiles", "points", "parts"), [(264, 10000, 1), (1, 200, 1), (1, 100000, 32), (132, 10000, 2)]
)
def test_points_are_parted_where_tiles_are_few(tiles, points, parts):
    assert lowering.parts_of(tiles, points, 264) == parts


@pytest.mark.parametrize("points", [0, 1, 300, 5000, 100000])
@pytest.mark.parametrize("lower", [on_lanes, by_tensor_cores])
def test_parts_hold_all_points_and_none_is_empty(points, lower):
    made = lower(problem(points=points))
    per_part = struct.unpack("<12i", only(made).fixed[-48:])[7]
    assert made.parts == struct.unpack("<12i", only(made).fixed[-48:])[6]
    assert (made.parts - 1) * per_part < max(points, 1) <= made.parts * per_part
    assert per_part % direct.TILE_K == 0
    assert only(made).grid[1] == made.parts


def test_partial_sums_go_to_a_workspace():
    made = on_lanes(problem(points=100000, sets=3, accumulate=True))
    fields = struct.unpack("<3q12q5q3q3qd12i", only(made).fixed)
    assert made.parts > 1
    assert fields[15:20] == (3 * 4000, 4000, 40, 1, 3 * 4000)
    assert fields[-3] == 0  # accumulate


@pytest.mark.parametrize("sets", [0, 1, 2, 3, 4, 5, 16, 33])
def test_coefficients_fill_tiles(sets):
    made = on_lanes(problem(points=64, sets=sets))
    tile = {0: 0, 1: 1, 2: 2}.get(sets, 4)
    assert f" O_TILE = {tile};" in only(made).spec.source
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
    made = on_lanes(problem(weights=layout))
    assert f" ACCESS_W = Access::{access};" in only(made).spec.source


@pytest.mark.parametrize(
    ("out", "vectors"),
    [
        (lowering.OutLayout(0, 4000, 40, 1), 1),
        (lowering.OutLayout(0, 4000, 1, 100), 2),
        (lowering.OutLayout(0, 4000, 1, 101), 0),
        (lowering.OutLayout(0, 4000, 40, 1, 4), 0),
        (lowering.OutLayout(0, 4001, 40, 1), 0),
    ],
)
def test_how_out_is_written(out, vectors):
    made = on_lanes(problem(points=64, sets=2, out=out))
    assert struct.unpack("<12i", only(made).fixed[-48:])[8] == vectors


@pytest.mark.parametrize("features", [8, 16, 32, 64, 96, 100, 768])
@pytest.mark.parametrize("sets", [1, 8, 16, 40])
def test_tiles_of_tensor_cores_fit(features, sets):
    made = problem(features=features, sets=sets)
    for arch, limit in targets.SHARED_BYTES.items():
        kernel, tile = chosen_tile(made, arch)
        assert tensor.shared_bytes(True, tensor.columns_of(made, arch), tile) <= limit
        by_wgmma = isinstance(kernel, tensor.TensorWgmma)
        assert by_wgmma == (arch == HERE and features > tensor.NARROW and sets > 8)
    assert chosen_tile(problem(features=8), HERE)[1].features == 16


def chosen_tile(made, arch):
    option = choose(tensor.KERNELS, made, Gpu(arch, COUNT))
    return option.kernel, option.knobs["tile"]


# What NVRTC makes of it.


def matrix():
    """Name to (spec, arch): each slope, type, access and tile at least once."""
    cases = {}
    accesses = ("features", "points", "strided")
    sign = Subject("Difference", tensor.SIGN)
    lanes, mma = Gradient(), tensor.TensorMma()
    for index, slope in enumerate(dict.fromkeys(lowering.SLOPES)):
        for dtype in ("float32", "float64"):
            access = accesses[index % 3], accesses[(index + 1) % 3]
            made = lanes.Variant(dtype, dtype, index % 2, *access)
            subject = Subject("Difference", slope)
            cases[f"{slope} {dtype}"] = (lanes.spec(subject, made, HERE), HERE)
    for tile in direct.O_TILES:
        for dtype in ("float32", "float64", "bfloat16"):
            made = lanes.Variant(dtype, dtype, tile, "points", "points")
            cases[f"sets {tile} {dtype}"] = (lanes.spec(sign, made, HERE), HERE)
    made = lanes.Variant("float16", "float32", 4, "strided", "features")
    cases["dot"] = (lanes.spec(Subject("Dot", "PowerSlope"), made, HERE), HERE)
    for arch in ("sm_80", "sm_86", "sm_120"):
        made = lanes.Variant("float32", "float32", 1, *accesses[:2])
        cases[f"{arch} direct"] = (lanes.spec(sign, made, arch), arch)
        for slope, columns in (("AbsSlope", 0), ("AbsSlope", 2), ("PowerSlope", 1)):
            is_sign = slope == tensor.SIGN
            tile = next(
                t for t in tensor.TILES[is_sign][columns]
                if tensor.shared_bytes(is_sign, columns, t) <= targets.SHARED_BYTES[arch]
            )  # fmt: skip
            spec = mma.spec(Subject("Difference", slope), mma.Variant(columns, tile), arch)
            cases[f"{arch} tensor {slope} {columns}"] = (spec, arch)
    for is_sign, kernel in product((True, False), (mma, tensor.TensorWgmma())):
        table = kernel.tiles[is_sign]
        for columns, tile in ((c, t) for c, tiles in table.items() for t in tiles):
            for slope in ("AbsSlope",) if is_sign else ("ThreeHalvesSlope", "DeviceSlope"):
                unit = "mma" if kernel is mma else "wgmma"
                name = f"{unit} {slope} {columns} {tile.queries}x{tile.features}"
                subject = Subject("Difference", slope)
                spec = kernel.spec(subject, kernel.Variant(columns, tile), HERE)
                cases[name] = (spec, HERE)
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
    subject, scope = Subject("Difference", "AbsSlope"), Scope(HERE, ("float32",))
    kernels = (Gradient(), *tensor.KERNELS)
    known = {s.source for one in kernels for s in one.specs(subject, scope, HERE)}
    for sets, points in product((0, 1, 2, 7, 16, 40), (64, 100000)):
        for features, lower in product((16, 40, 768), (on_lanes, by_tensor_cores)):
            made = problem(points=points, sets=sets, features=features)
            assert only(lower(made)).spec.source in known
