"""Lowering of reductions in float64, what NVRTC makes of it, and its exponential, by threads of the
host."""

import ctypes
import math
import struct
from decimal import Decimal, localcontext

import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels import double
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.problem import Call, scalar_count
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.kernel import Gpu
from tests.families.pairwise.lowering.cases import problem as of_type
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

GAUSSIAN, DOT, NORM = kl.gaussian(), kl.dot_product(), kl.laplace_l1()


def problem(**changes):
    return of_type(**{"dtype": "float64"} | changes)


def lowered(descriptor=GAUSSIAN, per_split=0, **changes):
    strides = (0,) * scalar_count(descriptor)
    call = Call(descriptor, problem(**changes), strides)
    kind = double.SMALL if double.is_small(descriptor, call.problem) else double.DOUBLE
    return kind.launch(descriptor, call, Gpu("sm_90a", 132), {"per_split": per_split})


def takes(descriptor, **changes):
    call = Call(descriptor, problem(**changes))
    return any(kind.takes(call, "sm_90a") for kind in double.KERNELS)


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
    assert takes(descriptor, **changes) is taken


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
    assert takes(descriptor, **changes)
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


@pytest.mark.parametrize("m, n", [(10, 10**6), (60000, 60000), (10**6, 100)])
def test_partial_results_fill_a_gpu_and_stay_small(m, n):
    made = lowered(m=m, n=n)
    assert made.per_part % double.TILE == 0
    assert (made.parts - 1) * made.per_part < n <= made.parts * made.per_part
    assert made.parts == 1 or 8 * made.parts * m <= 64 << 20
    assert made.steps[1].grid[0] >= min(132, -(-m // 64) * -(-n // 64))


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
    powers = any(f"using Inner = {term};" in text for term in ("Power", "PowerOnDevice"))
    powers |= "POWERS = true;" in text and "CENTRED = true;" in text
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
#include "common/double_exponential.cuh"

constexpr int THREADS = 32;
struct Numbers { const double* x; double* y; long long count; };

extern "C" __global__ void exponentials(const Numbers p) {
    for (long long i = threadIdx.x; i < p.count; i += THREADS) p.y[i] = branchless::exp(p.x[i]);
}
"""


@pytest.mark.few(1)
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
