"""Powers of reductions in float64 (double/power.cuh): by threads of the host, beside long doubles,
and what NVRTC makes of the kernels that take them."""

import ctypes
import math
import struct
from itertools import product

import numpy as np
import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels import double
from kernlib.families.pairwise.lowering import finish
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from tests.families.pairwise.lowering.test_double import lowered, problem
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.speeds import slow_but

POWERS = """#include "common/types.cuh"
#include "pairwise/double/power.cuh"

constexpr int THREADS = 32;
struct Numbers { const double* x; const double* p; double* y; double* sizes; long long count; };

extern "C" __global__ void powers(const Numbers n) {
    for (long long i = threadIdx.x; i < n.count; i += THREADS) {
        n.y[i] = branchless::power(n.x[i], n.p[i]);
        n.sizes[i] = branchless::fast_power(n.x[i], n.p[i]);
    }
}
"""
LARGEST, SMALLEST = 1.797e308, 2.2251e-308  # of powers that are no ends
COUNT = 20000


@pytest.fixture
def powers(tmp_path_factory):
    """x^p of any base, and of sizes, as arrays."""
    emulator = Emulator(kernels_of(tmp_path_factory))

    def computed(x, p):
        given = [np.ascontiguousarray(t, dtype=float) for t in np.broadcast_arrays(x, p)]
        found = [np.empty(given[0].size) for _ in range(2)]
        block = struct.pack("<4Qq", *(t.ctypes.data for t in (*given, *found)), given[0].size)
        memory = ctypes.create_string_buffer(block)
        spec = KernelSpec("pairwise", POWERS, "powers", 32)
        emulator.launch(spec, (1, 1), ctypes.addressof(memory))
        return found

    return computed


def cases():
    """Name to bases and exponents: sizes and logarithms of all magnitudes."""
    random = np.random.default_rng(7)

    def between(low, high):
        return random.uniform(low, high, COUNT)

    sign = random.choice([-1.0, 1.0], COUNT)
    wide, near = 10 ** between(-300, 300), 1 + sign * 10 ** between(-16, -1)
    far = between(690, 708) * sign / np.log(10 ** between(0.01, 3))
    return {
        "p-norms": (10 ** between(-6, 6), between(0.3, 50)),
        "negative alphas": (1 + 10 ** between(-8, 8), -(10 ** between(-1, 1.5))),
        "all magnitudes": (wide, between(-1, 1)),
        "near 1": (near, sign * 10 ** between(-1, 14)),
        "large logarithms": (10 ** between(0.01, 3), far),
        "denormal bases": (between(0.1, 1) * 2 ** between(-1060, -1022), between(0.01, 0.95)),
        "ends of mantissas": (2 ** np.round(between(-500, 500)) * 0.5**0.5 * near, between(-2, 2)),
    }


CASES = cases()


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", CASES)
def test_powers_are_within_two_roundings_and_their_logarithm(name, powers):
    x, p = CASES[name]
    logarithm = np.abs(np.log(x.astype(np.longdouble)) * p)
    with np.errstate(over="ignore", under="ignore"):
        wanted = x.astype(np.longdouble) ** p
    inside = (wanted > SMALLEST) & (wanted < LARGEST)
    assert inside.sum() > COUNT // 4
    for found in powers(x, p):
        error = np.abs(found[inside] / wanted[inside] - 1)
        assert (error <= 4.5e-16 + 2.1e-17 * logarithm[inside]).all()
        assert (found[wanted > 1.7977e308] == math.inf).all()
        assert (found[wanted < 1e-310] == 0).all()


BASES = (0.0, 1.0, 2.0, 0.5, 1e-300, 1e300, 5e-324, math.inf, math.nan)
EXPONENTS = (0.0, 1.0, 2.0, 3.0, 17.0, 0.5, 1.5, 50.0, 1e300, 1e308, 5e-324, 2.0**53 + 2, math.inf)


@pytest.mark.few(1)
@pytest.mark.emulated
def test_special_values_are_those_of_pow(powers):
    bases = [sign * x for x in BASES for sign in (1, -1)]
    exponents = [sign * p for p in EXPONENTS for sign in (1, -1)]
    x, p = np.array(list(product(bases, exponents))).T
    with np.errstate(all="ignore"):
        wanted = np.power(x, p)
    wanted = np.where(np.abs(wanted) < SMALLEST, np.copysign(0.0, wanted), wanted)
    found, sizes = powers(x, p)
    np.testing.assert_allclose(found, wanted, rtol=5e-16)
    written = ~np.isnan(wanted)
    assert (np.signbit(found) == np.signbit(wanted))[written].all()
    forward = ~np.signbit(x)
    np.testing.assert_allclose(sizes[forward], wanted[forward], rtol=5e-16)


@pytest.mark.emulated
def test_powers_of_1_and_to_the_0_are_1(powers):
    random = np.random.default_rng(8)
    p, x = random.normal(size=1000) * 1e3, 10 ** random.uniform(-300, 300, 1000)
    assert all((found == 1).all() for found in (*powers(1.0, p), *powers(x, 0.0)))
    assert all((found == 1).all() for found in powers(1.0, np.array([1e308, -math.inf])))


@pytest.mark.emulated
def test_an_exponent_that_is_no_number_has_no_powers(powers):
    found, sizes = powers(np.array([0.0, 0.5, 2.0, math.inf, -1.0]), math.nan)
    assert np.isnan(found).all() and np.isnan(sizes).all()


RATIONAL, NORM = kl.rational_quadratic(), kl.p_distance()
KERNELS = {
    "products": (RATIONAL, {}),
    "sums": (RATIONAL, {"reduction": "sum", "epsilon": True, "regularized": True}),
    "terms": (RATIONAL, {"k": 3, "columns": 8}),
    "rows": (RATIONAL, {"k": 7, "columns": 4}),
    "narrow rows": (RATIONAL, {"k": 2, "columns": 4}),
    "rows' sums": (RATIONAL, {"k": 7, "reduction": "sum", "epsilon": True, "regularized": True}),
    "roots": (NORM, {"k": 3, "inner": 3.0, "root": True}),
    "p-norm": (NORM, {"inner": "any", "root": True}),
    "p-norm on the device": (NORM, {"inner": "device", "root": True}),
    "outer power": (kl.Pairwise("dot", outer=kl.Power()), {}),
}
FAST = ("products", "rows' sums")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("name", slow_but(FAST, KERNELS))
def test_no_kernel_spills(name, arch):
    descriptor, changes = KERNELS[name]
    wanted = lowered(descriptor, m=10**5, n=10**5, **changes).steps[-1].spec
    made = compiled(wanted, arch)
    assert made.spilled == 0
    held = targets.resident_blocks(arch, wanted.threads, made.registers, made.shared)
    assert held >= (1 if arch == "sm_120" and made.shared > 50_000 else 2)


@pytest.mark.parametrize(
    "descriptor, changes, taken",
    [
        (RATIONAL, {}, True),
        (kl.gaussian(), {}, False),
        (kl.polynomial(3), {}, False),  # by multiplications
        (NORM, {"inner": 3.0, "root": True}, True),
        (NORM, {"inner": 2.0, "root": True}, False),
        (kl.Pairwise(outer=kl.Power()), {"outer": 0.5}, False),
        (kl.Pairwise(outer=kl.Power()), {}, True),
    ],
)
def test_where_values_are_powers(descriptor, changes, taken):
    given = problem(**changes)
    assert finish.takes_powers(descriptor, given) is taken
    spec = double.DOUBLE.spec(descriptor, double.variant(descriptor, given), "sm_90a")
    assert ("POWERS = true;" in spec.source) is taken
