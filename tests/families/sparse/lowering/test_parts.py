"""Products with rows that are cut into parts: one launch, its sizes, and which blocks it has."""

import struct
from itertools import product

import pytest

import kernlib as kl
from kernlib.families.sparse.lowering import parts, slices
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.jit import targets

ARCHES = {"sm_90a": 132, "sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_120": 170}
every_lowering = pytest.mark.parametrize("lowering", slices.KERNELS.values(), ids=slices.KERNELS)


def problem(rows=4096, cols=4096, columns=1, dtype="float16", count=8):
    facts = (("parts", count), ("width", cols)) if count > 1 else (("width", cols),)
    return Problem(rows, cols, columns, dtype, -(-cols // 8) * 8, False, (rows, 1), facts)


def fixed(step):
    names = [member.split()[1] for member in parts.FIXED.members]
    return dict(zip(names, struct.unpack(parts.FIXED.format, step.fixed), strict=True))


@every_lowering
def test_a_product_is_one_launch(lowering):
    lowered = lowering.lower((kl.Bias(), kl.Scale()), problem(), "sm_90a", 132)
    (step,) = lowered.steps
    assert step.grid == (128, 1) and step.spec.threads == 256 and not lowered.workspace
    assert step.overlaps and step.scalars == 1
    names = ("data", "offsets", "rows", "x", "out", "vector0")
    assert step.pointers == tuple((name, 0) for name in names)
    numbers = fixed(step)
    assert (numbers["parts"], numbers["slots"], numbers["row_pitch"]) == (8, 1, 288)
    assert not numbers["ahead"] and fixed(lowering.ahead(step))["ahead"] == 1
    assert not lowering.lower((), problem(), "sm_86", 84).steps[0].overlaps


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("columns", (1, 2, 3, 8, 16))
def test_blocks_hold_x_and_take_all_slices(arch, columns):
    lowering, count = slices.KERNELS["u4"], ARCHES[arch]
    rows, cols = (1, 100, 4096, 22016, 70_000), (16, 1000, 4096, 14336, 28672)
    for size, width, number, dtype in product(rows, cols, (2, 5, 16, 32), ("float16", "float32")):
        case = problem(size, width, columns, dtype, number)
        if not parts.takes(case):
            assert width * (4 if dtype == "float32" else 2) > 56 * 1024
            continue
        (step,) = lowering.lower((), case, arch, count).steps
        chosen, numbers = parts.variant(lowering.code, case, arch, count), fixed(step)
        itemsize = 4 if dtype == "float32" else 2
        needed = (
            width + 4 * number
        ) * chosen.columns * itemsize + chosen.threads * chosen.columns * 4
        assert needed <= chosen.shared <= targets.SHARED_BYTES[arch]
        assert targets.resident_blocks(arch, chosen.threads, 32, chosen.shared) >= chosen.blocks
        assert numbers["slots"] * number <= chosen.threads // 32
        assert numbers["chunks"] * chosen.columns >= columns
        blocks = step.grid[0] // numbers["chunks"]
        assert numbers["step"] == blocks * numbers["slots"]
        assert blocks <= max(1, count * chosen.blocks // numbers["chunks"])


@every_lowering
@pytest.mark.parametrize("arch", ARCHES)
def test_variants_are_all_that_lowering_chooses(lowering, arch):
    listed = set(parts.variants(lowering.code, (), ("float16", "float32"), arch))
    rows, cols = (1, 4096, 12288, 65_535, 65_536), (16, 4096, 11008, 28672)
    counts = (1, 2, 5, 8, 16, 32)
    for size, width, number, dtype in product(rows, cols, counts, ("float16", "float32")):
        for columns in (1, 2, 3, 8):
            case = problem(size, width, columns, dtype, number)
            if parts.takes(case):
                steps = lowering.lower((), case, arch, ARCHES[arch]).steps
                assert {step.spec for step in steps} <= listed


def test_no_multiprocessor_has_many_more_slices_than_others():
    """Slices of the busiest one of an H200, for layers of language models."""
    sizes = {(4096, 8): 1, (12288, 8): 3, (22016, 5): 6, (11008, 8): 3, (49152, 8): 12}
    for (rows, number), most in sizes.items():
        (step,) = slices.KERNELS["u8"].lower((), problem(rows, count=number), "sm_90a", 132).steps
        numbers, chosen = fixed(step), step.spec.threads
        rounds = -(-numbers["slices"] // numbers["step"])
        assert rounds * -(-step.grid[0] // 132) * numbers["slots"] == most, (rows, chosen)


def test_which_problems_of_one_panel_are_one_launch():
    assert parts.takes(problem(100_000, 1000, 2, count=1))
    assert parts.takes(problem(8192, 1000, 16, count=1))
    assert not parts.takes(problem(8193, 1000, 3, count=1))
    assert parts.takes(problem(8193, 1000, 16, count=2))
    for case in (problem(columns=17), problem(columns=0), problem(dtype="float64")):
        assert not parts.takes(case)
    assert not parts.takes(problem(cols=28688)) and not parts.takes(problem(rows=2**31))
