"""Lowering of gradients of many features: which launches it takes, the block they share, where
things lie, and what NVRTC makes of it."""

import struct

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.kernels import points as kernels
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import points as lowering
from kernlib.families.pairwise.lowering.problem import scalar_count
from kernlib.families.pairwise.reductions import arguments, fused
from kernlib.jit import targets
from kernlib.lowering import division
from tests.families.pairwise.lowering.cases import constant
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only, stem
from tests.support.speeds import one_of_each, slow_but

GAUSSIAN, DOT = kl.gaussian(), kl.dot_product(epilogue=kl.Custom("tanh(s * v)", ("s",)))
HERE = "sm_90a"
TENSOR = torch.tensor(1.5)
LEAVES = ("a", "b", "v", "bandwidth")
WANTED = {"both": LEAVES, "first": ("a", "bandwidth"), "second": ("b", "v")}
KINDS = ("pack", "main", "direct")  # that share a block


def made(descriptor=GAUSSIAN, role="both", wanted=None, numbers=None, **changes):
    """The derivatives and the problem of a launch, with some of its fields changed."""
    numbers = {"bandwidth": TENSOR} if numbers is None else numbers
    wanted = WANTED[role] if wanted is None else wanted
    sizes = (("m", 5000), ("n", 7000), ("k", 64))
    m, n, k = (changes.get(name, value) for name, value in sizes)
    a, b, v = torch.ones(1, k).expand(m, k), torch.ones(1, k).expand(n, k), torch.ones(n, 1)
    request = arguments.request_of(descriptor, a, b, v, 0, 0, numbers)
    route = fused.route_of(request, tuple(wanted))
    points = "a" in wanted, "b" in wanted
    _, derivatives = fused.derivatives_of(request, route, any(points))
    problem = fused.problem_of(
        request, arguments.shape_of(request), points, torch.ones(1, m, 1)
    )._replace(role=role, values="v" in wanted, points=any(points))
    if role == "second":
        derivatives = derivatives._replace(others=())
    return derivatives, problem._replace(**changes)


def lowered(descriptor=GAUSSIAN, role="both", arch=HERE, processors=132, warpgroups=None, **given):
    derivatives, problem = made(descriptor, role, **given)
    strides = (0,) * scalar_count(descriptor)
    return kernels.lower(descriptor, derivatives, problem, arch, processors, strides, warpgroups)


def steps_of(found, *kinds):
    """The launches with a block of their own, by their kind."""
    named = {stem(step.spec).removeprefix("pairwise_points_"): step for step in found.steps}
    return [named[kind] for kind in kinds or KINDS]


# Which launches it takes.

TAKEN = {
    "features": (GAUSSIAN, {"k": 17}, True),
    "most features": (GAUSSIAN, {"k": 128}, True),
    "more features": (GAUSSIAN, {"k": 129}, False),
    "columns": (GAUSSIAN, {"columns": 4}, True),
    "more columns": (GAUSSIAN, {"columns": 5}, False),
    "dot": (DOT, {"numbers": {"s": TENSOR}, "wanted": ("a", "v", "s")}, True),
    "norm": (kl.p_distance(), {"numbers": {"p": 2.0}, "wanted": ("a", "v")}, True),
    "another norm": (kl.p_distance(), {"numbers": {"p": 3.0}, "wanted": ("a", "v")}, False),
    "differences": (kl.laplace_l1(), {}, False),
    "on the lanes": (kl.gaussian(direct=True), {}, True),
    "grids": (GAUSSIAN, {"m": 64, "n": 64, "batch": 70000}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_it_takes(name):
    descriptor, changes, taken = TAKEN[name]
    _, problem = made(descriptor, **changes)
    assert lowering.takes(descriptor, problem, HERE) is taken


def test_tensor_cores_are_those_of_hopper():
    _, problem = made()
    assert lowering.by_products(GAUSSIAN, problem, HERE)
    assert not lowering.by_products(kl.gaussian(direct=True), problem, HERE)
    assert not lowering.by_products(GAUSSIAN, problem, "sm_80")
    assert not lowering.by_products(GAUSSIAN, problem._replace(n=2**26), HERE)  # too much scratch
    assert only(lowered(kl.gaussian(direct=True))).pointers[0] == ("a", 0)
    assert [stem(step.spec) for step in lowered().steps[2:]] == [
        f"pairwise_points_{kind}" for kind in KINDS
    ]


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_shared_memory_of_each_gpu_holds_the_most_features(arch):
    _, problem = made(k=lowering.MOST_FEATURES, columns=4)
    assert lowering.takes(GAUSSIAN, problem, arch)


def test_it_pays_but_for_many_passes():
    _, problem = made(m=20000, n=20000)
    for k in (20, 64, 128):
        own = problem._replace(k=k)
        assert lowering.pays(GAUSSIAN, own, HERE, 1)
        assert lowering.pays(GAUSSIAN, own, HERE, 8)
        assert lowering.pays(GAUSSIAN, own, "sm_80", 1)
        assert not lowering.pays(GAUSSIAN, own, "sm_80", 8)
    assert not lowering.pays(GAUSSIAN, problem._replace(m=500, n=500), HERE, 8)


# The code.


@pytest.mark.parametrize(
    ("k", "columns", "hyper", "wanted"),
    [(17, 1, 1, (3, 24, 32)), (64, 1, 1, (3, 64, 64)), (64, 2, 1, (2, 64, 64)),
     (65, 1, 1, (2, 72, 80)), (128, 1, 1, (2, 128, 128)), (40, 4, 1, (3, 40, 48))],
)  # fmt: skip
def test_rows_of_a_block_follow_the_registers(k, columns, hyper, wanted):
    _, problem = made(k=k, columns=columns)
    found = lowering.variant(problem, hyper)
    assert (found.warpgroups, found.width, found.depth) == wanted
    assert found.stages >= lowering.LEAST_STAGES
    assert found.shared_bytes <= targets.SHARED_BYTES[HERE]


def test_what_is_not_wanted_is_not_packed():
    found = lowered(role="first", wanted=("bandwidth",))
    packing, main, _ = steps_of(found)
    assert "WANTS_POINTS = false" in main.spec.source
    assert packing.grid[0] == -(-7000 // lowering.GROUP)
    derivatives, problem = made(role="first", wanted=("bandwidth",))
    variant = lowering.variant(problem, len(derivatives.others))
    assert variant.lines_bytes == 4 * lowering.TILE_N


def test_packing_is_the_same_of_all_epilogues():
    first, second = (
        steps_of(lowered(each, role="second", wanted=("b", "v")), "pack")[0].spec
        for each in (GAUSSIAN, kl.matern32())
    )
    assert first == second


def test_sizes_and_numbers_do_not_reach_the_sources():
    small, large = (lowered(m=m, n=2 * m).specs for m in (100, 10**5))
    assert small == large


def test_blocks_of_each_kernel_cover_the_rows():
    found = lowered(m=1001, n=70000, batch=3, processors=8)
    _, main, behind = steps_of(found)
    rows = 64 * constant(main, "WARPGROUPS")
    for step, each in ((main, rows), (behind, lowering.DIRECT_TILE)):
        blocks = -(-1001 // each)
        assert step.grid == (blocks * found.parts * 3, 1)
        count = scalar_count(GAUSSIAN)
        assert struct.unpack(kernels.fields(count).format, step.fixed)[-2:] == (
            blocks, found.parts,
        )  # fmt: skip
    assert found.parts > 1


def test_a_dot_product_keeps_its_factor():
    found = lowered(DOT, "first", numbers={"s": TENSOR}, wanted=("a", "s"), factor=-1.0)
    count = scalar_count(DOT)
    for step in steps_of(found):
        assert struct.unpack(kernels.fields(count).format, step.fixed)[-5] == -1.0
        assert "DIFFERENCE = false" in step.spec.source


# Where things lie.


@pytest.mark.parametrize("batch", [1, 3])
def test_lines_lie_behind_the_points(batch):
    derivatives, problem = made(m=1001, n=2002, k=20, batch=batch)
    variant = lowering.variant(problem, len(derivatives.others))
    place = lowering.workspace(problem, variant)
    groups = -(-2002 // lowering.GROUP)
    each = groups * 4 * (64 * 2 * 24 * 2 + 24 * 4 + 64 * 2 * 4)
    assert place.points.size <= place.lines and place.lines % pack.ALIGNMENT == 0
    assert place.size - place.lines >= batch * each
    assert place.lines_stride == (each if batch > 1 else 0)


@pytest.mark.parametrize(("m", "n"), [(10, 10**6), (30000, 30000), (10**6, 100), (1, 1)])
@pytest.mark.parametrize("arch", [HERE, "sm_80"])
def test_parts_are_whole_groups_and_fit_the_workspace(m, n, arch):
    found = lowered(m=m, n=n, arch=arch)
    assert found.per_part % (lowering.GROUP if arch == HERE else 64) == 0
    assert (found.parts - 1) * found.per_part < n <= found.parts * found.per_part
    assert found.parts == 1 or found.parts * m * (64 + 1 + 1) * 4 <= division.WORKSPACE_BYTES


def test_few_rows_fill_a_gpu():
    assert steps_of(lowered(m=10, n=10**6), "main")[0].grid[0] >= 120


# What NVRTC makes of it.

ALPHA = {"bandwidth": TENSOR, "alpha": TENSOR}
COMPILED = {
    "gaussian": {},
    "20 features": {"k": 20},
    "20 features, 4 columns": {"k": 20, "columns": 4},
    "first": {"role": "first"},
    "second": {"role": "second"},
    "second of 4 columns": {"role": "second", "columns": 4},
    "2 columns": {"columns": 2},
    "80 features": {"k": 80},
    "128 features": {"k": 128},
    "128 features, 2 columns": {"k": 128, "columns": 2},
    "sum": {"weighted": False, "wanted": ("a", "b", "bandwidth")},
    "bandwidth alone": {"role": "first", "wanted": ("bandwidth",)},
    "v and bandwidth": {"wanted": ("v", "bandwidth")},
    "matern": {"descriptor": kl.matern52(), "k": 30},
    "rational quadratic": {
        "descriptor": kl.rational_quadratic(), "numbers": ALPHA, "wanted": (*LEAVES, "alpha"),
    },
    "dot": {"descriptor": DOT, "numbers": {"s": TENSOR}, "wanted": ("a", "b", "v", "s")},
    "epsilon": {
        "descriptor": kl.laplace_l2(), "numbers": {"bandwidth": 2.0, "epsilon": 1e-3},
        "wanted": ("a", "b", "v"),
    },
}  # fmt: skip
MATRIX = {
    step.spec.description: step.spec
    for changes in COMPILED.values()
    for step in steps_of(lowered(**changes))
}
# Bytes where four kinds of sums meet in one function: rows whose scale is lowered, pairs computed
# anew, which one tile in thousands takes.
RARE = 128


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(one_of_each(stem, MATRIX), MATRIX))
def test_a_kernel_compiles_within_its_bounds(name):
    wanted = MATRIX[name]
    found = compiled(wanted, HERE)
    assert not found.serialized
    assert found.spilled <= (RARE if stem(wanted) == "pairwise_points_main" else 0)
    resident = targets.resident_blocks(HERE, wanted.threads, found.registers, found.shared)
    assert resident >= (lowering.DIRECT_RESIDENT if stem(wanted).endswith("direct") else 1)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [arch for arch in targets.SHARED_BYTES if arch != HERE])
def test_other_architectures_compile_the_kernel_of_the_lanes(arch):
    for changes in ({"k": 20}, {"columns": 4}, {"role": "second"}):
        _, problem = made(**changes)
        assert lowering.takes(GAUSSIAN, problem, arch)
        assert compiled(only(lowered(arch=arch, **changes)).spec, arch).spilled == 0
