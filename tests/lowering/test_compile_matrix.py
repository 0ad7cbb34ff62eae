"""NVRTC takes a declared matrix of kernels, and none spills or grows.

How long they take to compile follows the machine, and is measured by ``benchmarks.service``; the
number of their instructions does not.
"""

from itertools import product

import pytest

import kernlib as kl
from kernlib.families.kronecker_sparse.kernels.factor import hopper, portable
from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.factor.portable import Portable
from kernlib.families.kronecker_sparse.kernels.gradient import weight_gradient as gradient
from kernlib.families.kronecker_sparse.kernels.gradient.weight_gradient import WeightGradient
from kernlib.families.kronecker_sparse.kernels.lanes.interleaved import Interleaved
from kernlib.families.kronecker_sparse.kernels.steps import split_k_sum
from kernlib.families.kronecker_sparse.kernels.steps.portable_pack import PortablePack
from kernlib.families.kronecker_sparse.kernels.steps.split_k_sum import SplitKSum
from kernlib.families.kronecker_sparse.kernels.steps.transpose import Transpose
from kernlib.families.kronecker_sparse.lowering import hopper_common as wgmma
from kernlib.families.kronecker_sparse.lowering import shapes
from kernlib.families.kronecker_sparse.lowering.problem import Scope
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering.problem import EXPONENT_STAGES, INNER_CODE
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.wgmma import multiply
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

HERE = "sm_90a"
SPILL_BYTES, REGISTERS = 128, 128  # two blocks of 256 threads share a multiprocessor
CUBIN_BYTES = 110 * 1000  # most of it unrolled sums, which long rows promote in two ways
BLOCKS = 2  # of a multiprocessor, as __launch_bounds__ promises
# 1.5 times the 5232 of the longest, and the 7168 of those with p on the device.
INSTRUCTIONS, INSTRUCTIONS_DEVICE_P = 7800, 10_700

POWER = kl.p_distance()
STAGES = {"Identity": kl.Identity(), "Abs": kl.Abs(), "Square": kl.Square(), "Sqrt": kl.Sqrt()}


def variant(
    dtype="float32", tile=128, a="features", b="features", inner="any", out=None,
    long_k=True, swapped=False, root=False,
):  # fmt: skip
    return DIRECT.Variant(dtype, out or dtype, tile, long_k, a, b, swapped, inner, "any", root)


def matrix():
    """Name to (descriptor, variant, arch): each choice of lowering at least once."""
    cases = {}
    for name, stage in STAGES.items():
        cases[f"term {name}"] = (kl.Pairwise(inner=stage), variant(), HERE)
        cases[f"dot {name}"] = (kl.Pairwise("dot", inner=stage), variant(tile=64), HERE)
    for power, code in INNER_CODE.items():
        cases[f"term {code} p={power}"] = (POWER, variant(inner=power, root=True), HERE)
    for stage in (stages.ExpPower, stages.PowerLog):
        descriptor = kl.Pairwise(inner=stage())
        for power, code in EXPONENT_STAGES[stage].items():
            cases[f"term {code} p={power}"] = (descriptor, variant(inner=power), HERE)
        cases[f"float64 {stage.__name__}"] = (descriptor, variant("float64", 64), HERE)
    made = variant("float64", 64, inner="device")
    cases["float64 ExpPowerOnDevice"] = (kl.Pairwise(inner=stages.ExpPower()), made, HERE)
    accesses = ("features", "points", "strided")
    for a in accesses:
        for b in accesses:
            cases[f"access {a} {b}"] = (kl.l1_distance(), variant(a=a, b=b), HERE)
    for dtype in ("float64", "float16", "bfloat16"):
        for a, b in zip(accesses, accesses[1:] + accesses[:1], strict=True):
            tile = 64 if dtype == "float64" else 128
            made = variant(dtype=dtype, tile=tile, a=a, b=b)
            cases[f"{dtype} {a} {b}"] = (kl.l2_distance(), made, HERE)
    cases["float16 to float32"] = (kl.l1_distance(), variant("float16", out="float32"), HERE)
    cases["float64 p"] = (POWER, variant("float64", 64, inner="device", root=True), HERE)
    for tile in (64, 128):
        for long_k in (False, True):
            made = variant(tile=tile, long_k=long_k)
            cases[f"tile {tile} long={long_k}"] = (kl.gaussian(), made, HERE)
    cases["symmetric"] = (kl.laplace_l1(symmetric=True), variant(), HERE)
    cases["swapped"] = (kl.Pairwise(inner=kl.Identity()), variant(swapped=True), HERE)
    epilogues = {
        "matern52": kl.matern52(),
        "rational quadratic": kl.rational_quadratic(),
        "polynomial": kl.polynomial(16),
        "power exponential": kl.laplace_pq(),
        "custom": kl.l1_distance(epilogue=kl.Custom("erf(v) + log1p(v) * s", ("s",))),
    }
    for name, descriptor in epilogues.items():
        made = variant(root=descriptor == kl.laplace_pq())
        cases[f"epilogue {name}"] = (descriptor, made, HERE)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
        cases[f"{arch} laplace"] = (kl.laplace_l1(), variant(), arch)
        cases[f"{arch} half"] = (POWER, variant("bfloat16", b="points", root=True), arch)
        if arch in ("sm_80", "sm_120"):
            cases[f"{arch} double"] = (kl.l2_distance(), variant("float64", 64, a="strided"), arch)
    return cases


CASES = matrix()


def instruction_cap(descriptor, made):
    codes = EXPONENT_STAGES.get(type(descriptor.inner), {})
    on_device = made.inner == "device" or codes.get(made.inner) == codes.get("device", "")
    return INSTRUCTIONS_DEVICE_P if on_device else INSTRUCTIONS


def made_of(name):
    """What NVRTC makes of a pairwise case."""
    descriptor, made, arch = CASES[name]
    return compiled(DIRECT.spec(descriptor, made, arch), arch)


FAST = ("term Sqrt", "dot Square", "float64 p", "symmetric", "sm_80 half", "sm_120 laplace")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_the_kernel_compiles_within_its_bounds(name):
    (descriptor, variant, arch), made = CASES[name], made_of(name)
    wanted = DIRECT.spec(descriptor, variant, arch)
    assert "pairwise_direct" in made.entry.kernel
    assert 0 < made.registers <= REGISTERS
    assert made.instructions <= instruction_cap(descriptor, variant)
    if variant.dtype == "float32":
        assert len(made.entry.cubin) <= CUBIN_BYTES
        if arch == HERE and variant.tile == 128:
            assert made.spilled <= SPILL_BYTES
    # A multiprocessor holds the blocks that the kernel promises.
    assert made.registers * wanted.threads * BLOCKS <= targets.REGISTERS
    assert wanted.threads * BLOCKS <= targets.RESIDENT_THREADS[arch]
    held = targets.resident_blocks(arch, wanted.threads, made.registers, made.shared)
    assert held >= (BLOCKS if arch == HERE else 1)  # others have shared memory for one big tile


def test_the_matrix_has_every_term_and_every_access():
    text = "".join(DIRECT.spec(d, v, arch).source for d, v, arch in CASES.values())
    for code in (*STAGES, *(c for codes in EXPONENT_STAGES.values() for c in codes.values())):
        assert f"using Inner = {code};" in text
    for side in "AB":
        for access in ("features", "points", "strided"):
            assert f"ACCESS_{side} = Access::{access};" in text


def test_the_report_counts_dynamic_shared_memory():
    descriptor, made, arch = CASES["symmetric"]
    assert (
        made_of("symmetric").shared == DIRECT.spec(descriptor, made, arch).shared_bytes == 99 * 1024
    )


# Portable kernels of Kronecker-sparse factors.

SPARSE_INSTRUCTIONS = 2250  # 1.5 times the 1512 of the longest
ACTIVATED = (kl.Bias(), kl.Gelu())


def sparse_matrix():
    """Name to (spec, arch): each tile and access of each dtype, on every arch at least once."""
    cases = {}
    kinds = [("float16", "fp32"), ("float32", "fp32"), ("float32", "tf32")]

    def add(arch, dtype, precision, tile, left, right, partial=False, epilogue=()):
        variant = Portable.Variant(dtype, precision, tile, left, right, partial)
        wanted = Portable().spec(epilogue, variant, arch)
        cases[f"{arch} {wanted.description}"] = wanted, arch

    for kind in kinds[:2]:
        for left in portable.ACCESSES:
            for right in portable.ACCESSES:
                crowded = kind == kinds[1] or (left, right) == ("gather", "gather")
                add(HERE, *kind, portable.TALL if crowded else portable.BIG, left, right)
    for arch in ("sm_80", "sm_86", "sm_89", "sm_100", "sm_120"):
        for kind in kinds:
            tile = portable.TALL if kind == kinds[1] else portable.BIG
            add(arch, *kind, tile, "line", "depth", epilogue=ACTIVATED)
            add(arch, *kind, portable.TALL, "gather", "gather")
    for kind in (*kinds, ("bfloat16", "fp32")):
        add(HERE, *kind, portable.SMALL, "depth", "line", epilogue=ACTIVATED)
        add(HERE, *kind, portable.TALL, "gather", "depth", epilogue=ACTIVATED)
    add(HERE, *kinds[0], portable.BIG, "line", "line", partial=True)
    for dtype in ("float16", "bfloat16", "float32"):
        for step in (PortablePack(), SplitKSum()):
            cases[f"{HERE} {step.name} {dtype}"] = step.spec((), step.Variant(dtype)), HERE
    return cases


SPARSE = sparse_matrix()


def kind(wanted):
    """What tells the kernels of a family apart: "hopper" and its like, and the function's name."""
    return wanted.description.split()[1], stem(wanted)


FAST_SPARSE = one_of_each(lambda case: (*kind(case[0]), case[1] == HERE), SPARSE)


@pytest.mark.parametrize("name", slow_but(FAST_SPARSE, SPARSE))
def test_a_portable_kernel_compiles_within_its_bounds(name):
    wanted, arch = SPARSE[name]
    made = compiled(wanted, arch)
    assert made.entry.kernel == wanted.entry
    assert 0 < made.registers <= REGISTERS and made.spilled == 0
    assert len(made.entry.cubin) <= CUBIN_BYTES
    assert made.instructions <= SPARSE_INSTRUCTIONS
    sums = split_k_sum.SUM_BYTES if "sum of splits" in wanted.description else portable.PLACE_BYTES
    assert wanted.shared_bytes <= made.shared <= wanted.shared_bytes + sums
    held = targets.resident_blocks(arch, wanted.threads, made.registers, made.shared)
    assert held >= (1 if arch in ("sm_86", "sm_89", "sm_120") else BLOCKS)


# Hopper's kernels of Kronecker-sparse factors.

HOPPER_INSTRUCTIONS = 5100  # 1.5 times the 3400 of the longest
HOPPER_REGISTERS = 168  # of 384 threads; warpgroups that multiply take 232, the producers keep 40
SCALED = (kl.Bias(), kl.Scale(), kl.Gelu("tanh"))
KINDS = [("float16", "fp32"), ("bfloat16", "fp32"), ("float32", "fp32"), ("float32", "tf32")]


def hopper_matrix():
    """Name to spec: each width of tile of each kind, each order of packed weights."""
    specs = []
    for dtype, precision in KINDS:
        widths = hopper.COLUMNS[wgmma.products(dtype, precision)]
        for columns in widths if dtype != "bfloat16" else widths[-1:]:
            for last in (False, True):
                for resident in (1, 0) if columns == widths[-1] else (int(last),):
                    packed = dtype == "float32" or resident == 0
                    tile = columns, resident, packed
                    variant = Hopper.Variant(dtype, precision, last, last, *tile)
                    specs.append(of_hopper(variant, ACTIVATED if last else SCALED))
        specs.append(of_hopper(Hopper.Variant(dtype, precision, True, True, 64, 0, True)))
        specs += interleaved_specs(dtype, precision)
    for lines, widths in ((False, gradient.COLUMNS), (True, gradient.WHOLE_COLUMNS)):
        specs += [of_gradient("float16", lines, lines, width) for width in widths]
    specs.append(of_gradient("bfloat16", True, True, 256))
    for kernel in (Hopper(), Interleaved()):  # packed weights
        every = kernel.specs((), Scope((64, 512, 2), tuple(KINDS), HERE), HERE)
        specs += [spec for spec in every if stem(spec) == "kronecker_sparse_pack"]
    turns = [*product(("float16", "bfloat16"), (False, True)), ("float32", False)]
    specs += [Transpose().spec((), Transpose.Variant(*turn)) for turn in turns]
    for last in hopper.MIXED:
        specs.append(of_hopper(Hopper.Variant("bfloat16", "fp32", *last, 128, 0, True)))
    specs.append(of_gradient("float16", False, True, gradient.columns_of(64, True)))
    return {spec.description: spec for spec in specs}


def of_hopper(variant, epilogue=()):
    return Hopper().spec(epilogue, variant, HERE)


def of_gradient(*variant):
    return WeightGradient().spec((), WeightGradient.Variant(*variant), HERE)


def interleaved_specs(dtype, precision):
    def spec(epilogue):
        return Interleaved().spec(epilogue, variant, HERE)

    for shape, tiling in shapes.shapes(dtype, precision).items():
        for columns in tiling.columns if dtype != "bfloat16" else tiling.columns[:1]:
            variant = Interleaved.Variant(dtype, precision, shape, columns)
            widest = columns == tiling.columns[0]
            yield spec((kl.Bias(),) if widest else SCALED)
            if widest and precision == "tf32":  # whose registers the accumulators leave fewest of
                yield from map(spec, ((), SCALED))
    yield spec(())


HOPPER = hopper_matrix()


@pytest.mark.parametrize("name", slow_but(one_of_each(kind, HOPPER), HOPPER))
def test_a_kernel_for_hopper_compiles_within_its_bounds(name):
    wanted = HOPPER[name]
    made = compiled(wanted, HERE)
    assert made.entry.kernel == wanted.entry
    assert 0 < made.registers <= HOPPER_REGISTERS and made.spilled == 0
    assert len(made.entry.cubin) <= CUBIN_BYTES
    assert made.instructions <= HOPPER_INSTRUCTIONS
    assert targets.resident_blocks(HERE, wanted.threads, made.registers, made.shared) >= 1
    assert not made.serialized


# Changes sums between a wgmma and the wait for it.
SERIAL = f"""#include "common/types.cuh"
#include "common/hopper.cuh"

{multiply("float16", 16, False)}
extern "C" __global__ void serial(float* y, u64 a, u64 b, int count) {{
    float sums[8] = {{}};
    for (int i = 0; i < count; ++i) {{
        wgmma_fence();
        multiply(sums, a + i, b + i, 1);
        wgmma_commit();
        for (int k = 0; k < 8; ++k) sums[k] *= 2.0f;
        wgmma_wait<0>();
    }}
    for (int k = 0; k < 8; ++k) y[threadIdx.x * 8 + k] = sums[k];
}}
"""


def test_the_log_says_where_matrix_instructions_wait():
    made = compiled(KernelSpec("kronecker_sparse", SERIAL, "serial", 128), HERE)
    assert "wgmma.mma_async instructions are serialized" in made.log


# The table of architectures.


@pytest.mark.parametrize(
    "arch, registers, shared, blocks",
    [
        ("sm_90a", 128, 99 * 1024, 2),
        ("sm_90a", 129, 16 * 1024, 1),  # 136 of 8 warps
        ("sm_90a", 64, 16 * 1024, 4),
        ("sm_90a", 32, 1024, 8),  # threads
        ("sm_86", 32, 1024, 6),
        ("sm_86", 128, 99 * 1024, 1),
        ("sm_86", 128, 99 * 1024 + 1, 0),
        ("sm_80", 128, 81 * 1024, 2),
        ("sm_80", 128, 81 * 1024 + 1, 1),
    ],
)
def test_blocks_of_a_multiprocessor(arch, registers, shared, blocks):
    assert targets.resident_blocks(arch, 256, registers, shared) == blocks


def test_the_tables_know_the_same_architectures():
    assert list(targets.SHARED_BYTES) == list(targets.RESIDENT_THREADS)
    assert list(targets.SHARED_BYTES) == list(targets.MULTIPROCESSORS)
    assert all(0 < fewest <= most for fewest, most in targets.MULTIPROCESSORS.values())
