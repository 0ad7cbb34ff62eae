"""Products of bitmap matrices: launches and sizes, and kernels for every target."""

import struct

import pytest

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.kernels.bitmap import bitmap as kernels
from kernlib.families.sparse.kernels.bitmap.many import SLOT_TAIL
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.jit import targets
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

ARCHES = ("sm_90a", "sm_80", "sm_86", "sm_100", "sm_120")
EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())
HALF = ("float16", "bfloat16")


def problem(
    rows=8192, cols=28672, columns=1, dtype="float16", largest=4880, strides=None, name="bitmap"
):
    facts = (("largest", largest),)
    pitch = -(-cols // 8) * 8
    return Problem(rows, cols, columns, dtype, pitch, False, strides or (rows, 1), facts, name)


def fixed(step):
    fields = kernels.Bitmap.fixed
    return dict(zip(fields.names, struct.unpack(fields.format, step.fixed), strict=True))


def test_several_ranges_meet_in_the_workspace():
    lowered = choose.lower(EPILOGUE, problem(columns=8), "sm_90a", 132)
    first, second = lowered.steps
    assert first.grid == (132, 1) and not first.scalars and "sums" in first.spec.description
    found = fixed(first)
    ranges = -(-112 // (first.spec.threads // 32))
    assert (found["kchunks"], found["slabs"]) == (112, 512)
    assert found["cta_units"] * 132 + found["longer_ctas"] == ranges * 512
    assert found["range_chunks"] * ranges + found["wider_ranges"] == 112
    assert found["ranges"] == ranges
    assert lowered.workspace == 4 * ranges * 8 * 8192
    assert stem(second.spec) == "sparse_sum" and second.overlaps and second.scalars == 1
    assert second.pointers == (("workspace", 0), ("out", 0), ("vector0", 0))
    assert not choose.lower((), problem(columns=4), "sm_86", 84).steps[1].overlaps


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
@pytest.mark.parametrize("columns", (1, 8))
@pytest.mark.parametrize("largest", (512, 1504, 4880, 8704))
def test_the_ring_fits_shared_memory(largest, columns, arch):
    given = problem(columns=columns, largest=largest)
    first = choose.lower((), given, arch, 100).steps[0]
    found, warps = fixed(first), first.spec.threads // 32
    stages = found["stages"]
    assert 0 < stages <= kernels.MAX_STAGES
    assert found["slot_bytes"] >= largest + SLOT_TAIL and found["slot_bytes"] % 128 == 0
    assert (
        stages * warps * found["slot_bytes"] < first.spec.shared_bytes < targets.SHARED_BYTES[arch]
    )


def test_more_vectors_than_one_launch_takes_come_after_them():
    """Of x and of the result, which may lie apart, from their own first vector on."""
    given = problem(300, 2000, 20, strides=(1, 40))
    first, second = choose.lower(EPILOGUE, given, "sm_90", 132).steps
    alone = [choose.lower(EPILOGUE, given._replace(columns=n), "sm_90", 132) for n in (16, 4)]
    assert [step.fixed for step in (first, second)] == [each.steps[0].fixed for each in alone]
    assert first.pointers == alone[0].steps[0].pointers
    assert dict(second.pointers)["x"] == 16 * 2 * given.x_stride
    assert dict(second.pointers)["out"] == 16 * 2 * 1
    assert dict(second.pointers)["vector0"] == dict(second.pointers)["data"] == 0
    wide = choose.lower(EPILOGUE, problem(columns=32), "sm_90", 132)
    half = choose.lower(EPILOGUE, problem(columns=16), "sm_90", 132)
    assert wide.workspace == half.workspace > 0 and len(wide.steps) == 2 * len(half.steps)
    assert set(wide.specs) == set(half.specs)


def test_what_it_does_not_take():
    for given in (problem(dtype="float32"), problem(columns=33), problem(columns=0), problem(0)):
        assert not choose.takes(given, "sm_90")
        with pytest.raises(UnsupportedError, match="no bitmap kernel multiplies"):
            choose.lower((), given, "sm_90", 132)


def test_lowering_chooses_of_the_variants():
    known = choose.variants("bitmap", EPILOGUE, HALF, "sm_90a")
    for columns in (1, 2, 8, 9, 16, 17, 32, 100, 1000):
        for cols in (16, 2048, 28672):
            for largest in (600, 8704):
                given = problem(cols=cols, columns=columns, largest=largest)
                for step in choose.lower(EPILOGUE, given, "sm_90a", 132).steps:
                    assert step.spec in known


def cases():
    """Name to (spec, arch): of every target all variants, beside sm_90a of one dtype."""
    found = {}
    for arch in ARCHES:
        dtypes = HALF if arch == "sm_90a" else HALF[:1]
        for spec in choose.variants("bitmap", EPILOGUE, dtypes, arch):
            found[f"{arch} {spec.description}"] = spec, arch
    return found


CASES = cases()
FAST = one_of_each(lambda case: (stem(case[0]), case[1] == "sm_90a"), CASES)


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_every_variant_compiles_without_spills(name):
    made = compiled(*CASES[name])
    assert made.spilled <= 64 and made.registers <= 255
