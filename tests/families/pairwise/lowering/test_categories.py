"""Lowering of matrices with categories: kernels, grid and bytes."""

import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering.problem import Layout, Problem, Scope, scalar_count
from kernlib.families.pairwise.lowering.tables import Categories
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only
from tests.support.speeds import slow_but

# A tile, none of them in the loop over features; pow() of double takes 140 without tables too.
SPILL_BYTES = {"float32": 96, "bfloat16": 96, "float64": 240}
ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_120")
KERNELS = {
    "few": (kl.laplace_l1(categories=3), {}),
    "two groups": (kl.squared_distance(categories=12), {}),
    "any p": (kl.p_distance(categories=3), {"inner": "any", "root": True}),
    "p on the device": (kl.p_distance(categories=3), {"inner": "device", "root": True}),
    "terms that count zeros": (kl.exp_power_sum(categories=1), {"inner": "any"}),
}


def variant(descriptor, dtype="float32", tile=128, long=False, inner="any", root=False):
    return DIRECT.Variant(
        dtype, dtype, tile, long, "features", "strided", False, inner, "any", root
    )


def kinds():
    return [
        (name, dtype, tile, long)
        for name in KERNELS
        for dtype, tile in (("float32", 128), ("float32", 64), ("float64", 64), ("bfloat16", 128))
        for long in (False, True)
    ]


FAST = [("few", "float32", 128, False), ("any p", "float32", 128, True)]


@pytest.mark.parametrize("kind", slow_but(FAST, kinds()), ids=str)
def test_kernels_compile(kind):
    name, dtype, tile, long = kind
    descriptor, fields = KERNELS[name]
    made = DIRECT.spec(descriptor, variant(descriptor, dtype, tile, long, **fields), "sm_90a")
    assert compiled(made, "sm_90a").spilled <= SPILL_BYTES[dtype]


@pytest.mark.parametrize("arch", slow_but(["sm_90a"], ARCHS))
def test_small_tiles_compile_for_every_gpu(arch):
    made = DIRECT.spec(KERNELS["few"][0], variant(KERNELS["few"][0], tile=64), arch)
    assert compiled(made, arch).spilled == 0


@pytest.mark.parametrize("arch", sorted(targets.SHARED_BYTES))
def test_shared_memory_fits_every_gpu_and_two_blocks_a_hopper(arch):
    for name in KERNELS:
        known = DIRECT.specs(KERNELS[name][0], Scope(("float32", "float64"), arch), arch)
        most = max(spec.shared_bytes for spec in known)
        assert known and most <= targets.SHARED_BYTES[arch]
        assert 2 * (most + 1024) <= 228 * 1024


def test_the_most_categories_fit_the_parameters_of_a_launch():
    descriptor = kl.laplace_pq(categories=128)
    made = Categories(Layout(0, 1, 1), Layout(0, 1, 1), (3,) * 128, 0, True)
    problem = Problem(70, 200, 5, 1, *[Layout(0, 5, 1)] * 3)
    strides = (0,) * scalar_count(descriptor)
    step = only(DIRECT.launch_tables(descriptor, problem, Gpu("sm_90a", 132), strides, made))
    assert 8 * len(step.pointers) + 16 * step.scalars + len(step.fixed) <= 4096
