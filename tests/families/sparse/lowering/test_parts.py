"""Products with rows that are cut into parts: one launch, its sizes, and which blocks it has."""

import struct
from itertools import product

import pytest

import kernlib as kl
from kernlib.families.sparse.kernels.slices import parts
from kernlib.families.sparse.kernels.slices.parts import Parts
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.codes import SLICES
from kernlib.families.sparse.lowering.problem import Problem, Scope
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu

ARCHES = {"sm_90a": 132, "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_120": 170}
every_format = pytest.mark.parametrize("name", SLICES)


def problem(rows=4096, cols=4096, columns=1, dtype="float16", count=8, name="u4"):
    facts = (("parts", count), ("width", cols)) if count > 1 else (("width", cols),)
    return Problem(rows, cols, columns, dtype, -(-cols // 8) * 8, False, (rows, 1), facts, name)


def fixed(step):
    fields = Parts.fixed
    return dict(zip(fields.names, struct.unpack(fields.format, step.fixed), strict=True))


@every_format
def test_a_product_is_one_launch(name):
    given = problem(name=name)
    lowered = choose.lower((kl.Bias(), kl.Scale()), given, "sm_90a", 132)
    (step,) = lowered.steps
    assert step.grid == (128, 1) and step.spec.threads == 256 and not lowered.workspace
    assert step.overlaps and step.scalars == 1
    names = ("data", "offsets", "rows", "x", "out", "vector0")
    assert step.pointers == tuple((name, 0) for name in names)
    numbers = fixed(step)
    assert (numbers["parts"], numbers["slots"], numbers["row_pitch"]) == (8, 1, 288)
    (early,) = choose.lower((), given._replace(frozen=True), "sm_90a", 132).steps
    assert not numbers["ahead"] and fixed(early)["ahead"] == 1
    assert not choose.lower((), given, "sm_86", 84).steps[0].overlaps


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("columns", (1, 2, 3, 8, 16))
def test_blocks_hold_x_and_take_all_slices(arch, columns):
    count = ARCHES[arch]
    rows, cols = (1, 100, 4096, 22016, 70_000), (16, 1000, 4096, 14336, 28672)
    for size, width, number, dtype in product(rows, cols, (2, 5, 16, 32), ("float16", "float32")):
        case = problem(size, width, columns, dtype, number)
        if not Parts().takes(case, arch):
            assert width * (4 if dtype == "float32" else 2) > 56 * 1024
            continue
        (step,) = choose.lower((), case, arch, count).steps
        chosen, numbers = parts.variant_of(case, arch, count), fixed(step)
        threads, (shared, resident) = 32 * chosen.warps, chosen.room
        itemsize = 4 if dtype == "float32" else 2
        needed = (width + 4 * number) * chosen.columns * itemsize + threads * chosen.columns * 4
        assert needed <= shared <= targets.SHARED_BYTES[arch]
        assert targets.resident_blocks(arch, threads, 32, shared) >= resident
        assert numbers["slots"] * number <= chosen.warps
        assert numbers["chunks"] * chosen.columns >= columns
        blocks = step.grid[0] // numbers["chunks"]
        assert numbers["step"] == blocks * numbers["slots"]
        assert blocks <= max(1, count * resident // numbers["chunks"])


@every_format
@pytest.mark.parametrize("arch", ARCHES)
def test_variants_are_all_that_lowering_chooses(name, arch):
    scope = Scope(name, ("float16", "float32"), arch)
    listed = set(Parts().specs((), scope, arch))
    rows, cols = (1, 4096, 12288, 65_535, 65_536), (16, 4096, 11008, 28672)
    counts = (1, 2, 5, 8, 16, 32)
    for size, width, number, dtype in product(rows, cols, counts, ("float16", "float32")):
        for columns in (1, 2, 3, 8):
            case, gpu = problem(size, width, columns, dtype, number, name), Gpu(arch, ARCHES[arch])
            if Parts().takes(case, arch) and Parts().pays(case, gpu):
                steps = choose.lower((), case, *gpu).steps
                assert {step.spec for step in steps} <= listed


def test_no_multiprocessor_has_many_more_slices_than_others():
    """Slices of the busiest one of an H200, for layers of language models."""
    sizes = {(4096, 8): 1, (12288, 8): 3, (22016, 5): 6, (11008, 8): 3, (49152, 8): 12}
    for (rows, number), most in sizes.items():
        case = problem(rows, count=number, name="u8")
        (step,) = choose.lower((), case, "sm_90a", 132).steps
        numbers, chosen = fixed(step), step.spec.threads
        rounds = -(-numbers["slices"] // numbers["step"])
        assert rounds * -(-step.grid[0] // 132) * numbers["slots"] == most, (rows, chosen)


def test_which_problems_of_one_panel_are_one_launch():
    def is_one(case):
        return len(choose.lower((), case, "sm_90a", 132).steps) == 1

    assert is_one(problem(100_000, 1000, 2, count=1))
    assert is_one(problem(8192, 1000, 16, count=1))
    assert not is_one(problem(8193, 1000, 3, count=1))
    assert is_one(problem(8193, 1000, 16, count=2))
    for case in (problem(columns=17), problem(columns=0), problem(dtype="float64")):
        assert not Parts().takes(case, "sm_90a")
    assert not Parts().takes(problem(cols=28688), "sm_90a")
    assert not Parts().takes(problem(rows=2**31), "sm_90a")
