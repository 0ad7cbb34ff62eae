"""Lowering of reductions in float64, what NVRTC makes of it, and its exponential, by threads of the
host."""

import ctypes
import math
import struct
from decimal import Decimal, localcontext

import pytest

import kernlib as kl
from kernlib.families.pairwise.lowering import double, pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.direct import scalar_count
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.jit import sources, targets
from kernlib.jit.spec import KernelSpec
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

GAUSSIAN, DOT, NORM = kl.gaussian(), kl.dot_product(), kl.laplace_l1()


def problem(reduction="matmul", m=5000, n=7000, k=64, columns=1, batch=1, **changes):
    """A call on contiguous row-major tensors, with some fields changed."""
    columns = columns if reduction == "matmul" else 0
    step = 1 if batch > 1 else 0
    fields = {
        "a": Layout(m * k * step, k, 1),
        "b": Layout(n * k * step, k, 1),
        "v": Layout(n * columns * step, columns, 1),
        "columns": columns,
        "out_columns": columns,
        "dtype": "float64",
    }
    return Problem(reduction, m, n, k, batch, **(fields | changes))


def lowered(descriptor=GAUSSIAN, per_split=0, **changes):
    strides = (0,) * scalar_count(descriptor)
    return double.lower(descriptor, problem(**changes), 132, strides, per_split)


def constant(step, name):
    return int(step.spec.source.split(f" {name} = ")[1].split(";")[0])


@pytest.mark.parametrize(
    "descriptor, changes, taken",
    [
        (GAUSSIAN, {}, True),
        (GAUSSIAN, {"dtype": "float32"}, False),
        (GAUSSIAN, {"reduction": "sum"}, True),
        (GAUSSIAN, {"reduction": "min"}, False),
        (GAUSSIAN, {"reduction": "min", "k": 10}, True),
        (NORM, {"reduction": "logsumexp", "k": 10}, True),
        (NORM, {"reduction": "logsumexp", "k": 11}, False),
        (NORM, {"reduction": "logsumexp", "k": 10, "dtype": "float32"}, False),
        (kl.p_distance(), {"reduction": "min", "k": 3, "inner": "any"}, False),
        (GAUSSIAN, {"columns": 16}, True),
        (GAUSSIAN, {"columns": 17}, False),
        (NORM, {"columns": 8}, True),
        (NORM, {"columns": 9}, False),
        (NORM, {"columns": 16, "k": 16}, True),
        (GAUSSIAN, {"k": 0}, False),
        (GAUSSIAN, {"n": 0}, False),
        (GAUSSIAN, {"m": 2**31}, False),
    ],
)
def test_what_it_takes(descriptor, changes, taken):
    assert double.takes(descriptor, problem(**changes)) is taken


@pytest.mark.parametrize(
    "descriptor, changes, taken",
    [
        (GAUSSIAN, {}, True),
        (GAUSSIAN, {"k": 8}, True),
        (GAUSSIAN, {"k": 7}, False),
        (DOT, {}, True),
        (NORM, {}, False),
        (kl.p_distance(), {"inner": 2.0, "root": True}, True),
        (kl.p_distance(), {"inner": 1.5, "root": True}, False),
        (kl.squared_distance(direct=True), {}, False),
        (GAUSSIAN, {"m": 2**24, "k": 128}, False),  # more workspace than a call may take
        (GAUSSIAN, {"m": 10, "n": 10, "batch": 65536}, False),
    ],
)
def test_tensor_cores_multiply_points_of_some_features(descriptor, changes, taken):
    assert double.by_products(descriptor, problem(**changes)) is taken
    assert double.takes(descriptor, problem(**changes))
    assert len(lowered(descriptor, **changes).steps) == 1 + taken


@pytest.mark.parametrize(
    "descriptor, changes, small",
    [
        (GAUSSIAN, {"k": 7, "columns": 4}, True),
        (GAUSSIAN, {"k": 7, "columns": 5}, False),
        (GAUSSIAN, {"k": 7, "columns": 1, "out_columns": 9}, False),  # the last pass of nine
        (GAUSSIAN, {"k": 8}, False),
        (kl.gaussian(direct=True), {"k": 10}, True),
        (NORM, {"k": 10}, True),
        (NORM, {"k": 11}, False),
        (kl.p_distance(), {"k": 3, "inner": 3.0}, True),
        (kl.p_distance(), {"k": 3, "inner": "device"}, False),
        (GAUSSIAN, {"k": 10, "reduction": "logsumexp"}, True),
        (DOT, {"k": 10, "reduction": "min"}, True),
    ],
)
def test_rows_of_few_features_lie_in_registers(descriptor, changes, small):
    assert double.is_small(descriptor, problem(**changes)) is small
    (*_, step) = lowered(descriptor, **changes).steps
    assert (" small " in step.spec.description) is small


@pytest.mark.parametrize("descriptor", [GAUSSIAN, kl.rational_quadratic(), DOT, NORM])
@pytest.mark.parametrize("reduction", ["matmul", "sum"])
def test_parameters_are_as_long_as_the_device_says(descriptor, reduction):
    for step in lowered(descriptor, reduction=reduction).steps:
        size = 8 * len(step.pointers) + 16 * step.scalars + len(step.fixed)
        assert size == constant(step, "PARAMETER_BYTES")
    assert constant(step, "SCALARS") == scalar_count(descriptor)


@pytest.mark.parametrize("shared", [False, True])
def test_parameters_follow_the_structs(shared):
    given = {"m": 1001, "n": 2002, "k": 100, "batch": 3, "columns": 2, "diagonal": -7}
    given |= {"b": Layout(0, 100, 1)} if shared else {}
    made = lowered(**given)
    packing, main = made.steps
    place = double.workspace(problem(**given))
    count = scalar_count(GAUSSIAN)
    read = struct.unpack(f"<{count}q9q5q4i4q", main.fixed)[count:]
    assert read[9:14] == (1001, 2002, 3, -7, made.per_part)
    assert read[14:18] == (100, 16, 2, 2)
    strides = [1024 * 112, 2048 * 112, 1024, 2048]
    strides = [size * (place in (0, 2) or not shared) for place, size in enumerate(strides)]
    assert list(read[18:]) == strides == list(place[5:])
    assert main.grid == (16 * made.parts, 3) and packing.grid == (16 + 32, 3)
    read = struct.unpack("<7q7q4i", packing.fixed)
    assert read[:7] == (100100, 100, 1, 1001, strides[0], strides[2], 16)
    assert read[7:14] == (0 if shared else 200200, 100, 1, 2002, strides[1], strides[3], 32)
    assert read[14:] == (100, 7, not shared, 0)
    assert main.pointers[:4] == packing.pointers[2:]
    assert [name for name, _ in main.pointers[4:]] == list(direct.OPERANDS)
    ends = [at for _, at in main.pointers[1:4]] + [made.workspace]
    entries = [3, 1 if shared else 3] * 2
    for (_, at), end, size, each in zip(
        main.pointers[:4], ends, (1024 * 112, 2048 * 112, 1024, 2048), entries, strict=True
    ):
        assert at % pack.ALIGNMENT == 0 and at + 8 * size * each <= end


def test_constants_are_those_of_the_device():
    text = (sources.root() / "pairwise/double").joinpath
    assert f"THREADS = {double.THREADS};" in text("layout.cuh").read_text()
    assert f"TILE = {double.TILE}, DEPTH = {double.DEPTH};" in text("layout.cuh").read_text()
    assert f"STAGES = {double.STAGES};" in text("tile.cuh").read_text()
    assert double.LINE == double.DEPTH + 4 and "LINE = DEPTH + 4;" in text("tile.cuh").read_text()
    assert f"WIDTH = {double.WIDTH};" in text("double.cuh").read_text()


@pytest.mark.parametrize("m, n", [(10, 10**6), (60000, 60000), (10**6, 100)])
def test_partial_results_fill_a_gpu_and_stay_small(m, n):
    made = lowered(m=m, n=n)
    assert made.per_part % double.TILE == 0
    assert (made.parts - 1) * made.per_part < n <= made.parts * made.per_part
    assert made.parts == 1 or 8 * made.parts * m <= 64 << 20
    assert made.steps[1].grid[0] >= min(132, -(-m // 64) * -(-n // 64))


def test_passes_share_their_splits():
    first = lowered(columns=8, out_columns=9)
    second = lowered(columns=1, out_columns=9, per_split=first.per_part)
    assert first.parts == second.parts


def test_memory_is_that_of_points():
    small, large = (lowered(m=n, n=n).workspace for n in (50_000, 100_000))
    assert large <= 2.01 * small and large <= 2 * 100_100 * (64 + 1) * 8 + 4096


def matrix():
    """Name to spec: each kind of kernel with cheap and costly epilogues."""
    cases = [
        (GAUSSIAN, {}),
        (GAUSSIAN, {"regularized": True, "epsilon": True}),
        (GAUSSIAN, {"reduction": "sum"}),
        (GAUSSIAN, {"k": 3}),
        (GAUSSIAN, {"k": 3, "columns": 8}),
        (kl.gaussian(direct=True), {"k": double.SMALL_FEATURES, "columns": double.SMALL_COLUMNS}),
        (kl.rational_quadratic(), {"k": 7, "columns": 2, "regularized": True}),
        (kl.p_distance(), {"k": 5, "inner": 3.0, "root": True, "reduction": "sum"}),
        (kl.matern52(), {}),
        (kl.rational_quadratic(), {}),
        (kl.polynomial(16), {}),
        (NORM, {}),
        (NORM, {"reduction": "sum", "regularized": True}),
        (kl.p_distance(), {"inner": "any", "root": True}),
        (kl.p_distance(), {"inner": "device", "root": True}),
        (kl.p_distance(), {"inner": math.inf, "root": True}),
        (kl.exp_power_sum(), {"inner": 1.0}),
    ]
    many = {"m": 10**5, "n": 10**5}  # rows of a thread as many as registers take
    specs = [spec for descriptor, c in cases for spec in lowered(descriptor, **many | c).specs]
    return {spec.description: spec for spec in specs}


MATRIX = matrix()
HERE = "sm_90a"


@pytest.mark.parametrize("arch", [HERE, pytest.param("sm_80", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(one_of_each(stem, MATRIX), MATRIX))
def test_a_kernel_compiles_within_its_bounds(name, arch):
    wanted = MATRIX[name]
    made = compiled(wanted, arch)
    assert made.spilled == 0
    held = targets.resident_blocks(arch, wanted.threads, made.registers, made.shared)
    text = wanted.source  # two blocks where terms are powers, or values of products
    powers = any(f"#define INNER {term}\n" in text for term in ("Power", "PowerOnDevice"))
    powers |= "#define POWERS\n" in text and "#define CENTRED 1\n" in text
    two = arch != HERE or powers or " small " in name
    assert held >= (2 if two else double.RESIDENT)


OTHERS = {
    "gaussian": (GAUSSIAN, {}),
    "rational quadratic": (kl.rational_quadratic(), {}),
    "squared": (kl.squared_distance(), {}),
    "l1": (kl.l1_distance(), {}),
    "cube root": (kl.p_distance(), {"inner": 3.0, "root": True}),
}
FEATURES = range(1, double.SMALL_FEATURES + 1)
OTHER_CALLS = [(name, k, 10**5) for name in OTHERS for k in FEATURES]
OTHER_CALLS += [("rational quadratic", k, 100) for k in FEATURES]  # a row of a thread


@pytest.mark.parametrize("arch", [HERE, *slow_but((), ("sm_80", "sm_120"))])
@pytest.mark.parametrize("case", slow_but((("gaussian", 4, 10**5),), OTHER_CALLS), ids=str)
@pytest.mark.parametrize("reduction", ["logsumexp", "min"])
def test_log_sum_exps_and_minima_leave_no_register_to_memory(reduction, case, arch):
    name, k, m = case
    descriptor, changes = OTHERS[name]
    for regularized in (False, True):
        given = {"reduction": reduction, "k": k, "m": m, "n": m, "regularized": regularized}
        (step,) = lowered(descriptor, **given, **changes).steps
        made = compiled(step.spec, arch)
        assert made.spilled == 0
        held = targets.resident_blocks(arch, step.spec.threads, made.registers, made.shared)
        assert held >= direct.RESIDENT


def test_values_of_a_gaussian_go_through_the_pipe_side_by_side():
    """Without calls and with fewer instructions than the function of CUDA takes."""
    main = lowered().steps[1].spec
    assert compiled(main, HERE).instructions < 1900


EXPONENTIAL = """#include "common/types.cuh"
#include "pairwise/double/exponential.cuh"

constexpr int THREADS = 32;
struct Numbers { const double* x; double* y; long long count; };

extern "C" __global__ void exponentials(const Numbers p) {
    for (long long i = threadIdx.x; i < p.count; i += THREADS) p.y[i] = branchless::exp(p.x[i]);
}
"""


@pytest.mark.emulated
def test_the_exponential_is_within_two_roundings(tmp_path):
    grid = [-708 + 1417.75 * i / 4999 for i in range(5000)]
    near = [math.log(2) * (i + 0.5) * (1 + e) for i in range(-40, 40) for e in (-1e-15, 0, 1e-15)]
    ends = [0.0, -0.0, 1e-300, -1e-17, -707.999, 709.78, -708.0, 709.79, -1e300, 1e300]
    ends += [math.inf, -math.inf, math.nan]
    given = [*grid, *near, *ends]
    array = ctypes.c_double * len(given)
    x, y = array(*given), array()
    spec = KernelSpec("pairwise", EXPONENTIAL, "exponentials", 32)
    block = struct.pack("<2Qq", ctypes.addressof(x), ctypes.addressof(y), len(given))
    memory = ctypes.create_string_buffer(block)
    Emulator(tmp_path).launch(spec, (1, 1), ctypes.addressof(memory))
    with localcontext() as context:
        context.prec = 40
        worst = max(
            abs(Decimal(found) / Decimal(value).exp() - 1)
            for value, found in zip(given, y, strict=True)
            if -708 < value < 709.78125
        )
    assert worst <= 4.4e-16
    found = y[-len(ends) :]
    assert found[:2] == [1.0, 1.0] and found[6] == 0.0
    assert found[7:12] == [math.inf, 0.0, math.inf, math.inf, 0.0] and math.isnan(found[12])
