"""Products with the formats u8, u4 and u2: launches and sizes, and kernels for every target."""

import struct

import pytest

import kernlib as kl
from kernlib.families.sparse.kernels.slices import slices
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.codes import SLICES
from kernlib.families.sparse.lowering.problem import Problem
from kernlib.jit import targets
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

ARCHES = ("sm_90a", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120")
EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())
DTYPES = ("float16", "bfloat16", "float32")
INSTRUCTIONS = 4000  # 1.5 times the 2680 of the longest


def problem(rows=8192, cols=28672, columns=1, dtype="float16", width=1792, name="u8"):
    strides = (rows, 1)
    facts = (("width", width),)
    return Problem(rows, cols, columns, dtype, -(-cols // 8) * 8, False, strides, facts, name)


def fixed(step):
    fields = slices.Slices.fixed
    return dict(zip(fields.names, struct.unpack(fields.format, step.fixed), strict=True))


every_format = pytest.mark.parametrize("name", SLICES)


@every_format
def test_a_product_is_two_launches(name):
    lowered = choose.lower((kl.Bias(),), problem(name=name), "sm_90a", 132)
    first, last = lowered.steps
    assert first.overlaps and last.overlaps and not first.scalars and not fixed(first)["ahead"]
    assert first.grid == (264, 1) and last.grid == (256, 1)
    assert fixed(first)["slices"] == 16 * 256 and fixed(first)["panel_slices"] == 256
    assert lowered.workspace == 4 * 16 * 8192
    assert last.pointers == (("workspace", 0), ("out", 0), ("vector0", 0))
    assert not choose.lower((), problem(name=name), "sm_86", 84).steps[1].overlaps


@every_format
@pytest.mark.parametrize("columns", range(1, 17))
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_take_all_columns(columns, dtype, name):
    given = problem(columns=columns, dtype=dtype, width=896, name=name)
    for arch in ARCHES:
        assert choose.takes(given, arch)
        first, last = choose.lower((), given, arch, 132).steps
        made = slices.variant_of(given, arch, 132)
        found = fixed(first)
        assert found["chunks"] * made.columns >= columns > (found["chunks"] - 1) * made.columns
        assert first.grid[0] == found["chunks"] * found["ranges"] <= 132 * 2 * 2
        assert found["held"] >= 1 and last.grid[1] == columns


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", slices.COLUMNS)
def test_shared_memory_holds_a_panel_of_each_width(dtype, columns, arch):
    itemsize = 4 if dtype == "float32" else 2
    for width in (16, 512, 528, 896, 1024, 1792, 2048)[: 7 if itemsize == 2 else 5]:
        given = problem(columns=columns, dtype=dtype, width=width)
        variant = slices.variant_of(given, arch, 132)
        held, (copies, shared) = slices.panels_in_shared(variant, width), variant.holding
        assert held >= 1 and choose.takes(given, arch)
        assert held * width * columns * itemsize * copies <= shared
        assert shared + slices.COUNTER_BYTES <= targets.SHARED_BYTES[arch]


@every_format
def test_small_and_empty_problems(name):
    assert choose.lower((), problem(name=name, rows=0), "sm_90a", 132).steps == ()
    (only,) = choose.lower((), problem(name=name, cols=0), "sm_90a", 132).steps
    assert stem(only.spec) == "sparse_slices_reduce"
    (only,) = choose.lower((), problem(name=name, rows=1, cols=1), "sm_90a", 132).steps
    assert stem(only.spec) == "sparse_parts" and only.grid == (1, 1)
    first, _ = choose.lower((), problem(name=name, rows=1, cols=1793), "sm_90a", 132).steps
    assert first.grid == (2, 1)
    assert not choose.takes(problem(name=name, columns=17), "sm_90a")
    assert not choose.takes(problem(name=name, columns=0), "sm_90a")
    assert not choose.takes(problem(name=name, dtype="float64"), "sm_90a")
    assert not choose.takes(problem(name=name, width=2064), "sm_90a")
    assert not choose.takes(problem(name=name, dtype="float32", width=1040), "sm_90a")
    assert not choose.takes(problem(name=name, rows=2**31, cols=2**20, width=16), "sm_90a")
    assert not choose.takes(problem(name=name, rows=2**32, cols=1, width=16), "sm_90a")
    assert not choose.takes(problem(name=name, rows=1, cols=2**32, width=1792), "sm_90a")
    many = choose.lower((), problem(name=name, rows=70_000), "sm_90a", 132).steps[0]
    assert "using RowT = u32" in many.spec.source


@every_format
@pytest.mark.parametrize("arch", ARCHES)
def test_variants_are_all_that_lowering_chooses(name, arch):
    known = set(choose.variants(name, EPILOGUE, DTYPES, arch))
    for dtype in DTYPES:
        for columns in range(1, 17):
            for rows in (100, 65_535, 65_536):
                for width in (512, 1024, 1792)[: 2 if dtype == "float32" else 3]:
                    given = problem(rows, 28672, columns, dtype, width, name)
                    steps = choose.lower(EPILOGUE, given, arch, 132).steps
                    assert {step.spec for step in steps} <= known


def cases():
    """Each text once: bytes of shared memory are no part of it. Targets beside sm_90a compile
    no bfloat16 and rows of 2 bytes alone, and blocks of parts of 512 threads."""
    found = {}
    for arch in ARCHES:
        for name in SLICES:
            dtypes = DTYPES if arch == "sm_90a" else DTYPES[::2]
            made = choose.variants(name, EPILOGUE, dtypes, arch)
            if arch != "sm_90a":
                made = [spec for spec in made if "RowT = u32" not in spec.source]
                made = [s for s in made if stem(s) != "sparse_parts" or s.threads == 512]
            made += choose.codec_specs(name, DTYPES if arch == "sm_90a" else DTYPES[:1])
            for spec in made:
                found[f"{arch} {spec.source}"] = spec, arch
    return {f"{arch} {spec.description}": (spec, arch) for spec, arch in found.values()}


CASES = cases()


FAST = one_of_each(lambda case: (stem(case[0]), case[1] == "sm_90a"), CASES)


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_kernels_compile_without_spills(name):
    spec, arch = CASES[name]
    made = compiled(spec, arch)
    assert made.entry.kernel == spec.entry and made.spilled == 0
    assert len(made.entry.cubin) <= 64_000 and made.instructions <= INSTRUCTIONS
    if stem(spec) in ("sparse_slices", "sparse_parts"):
        blocks = int(spec.source.split("BLOCKS = ")[1].split(";")[0])
        held = targets.resident_blocks(arch, spec.threads, made.registers, made.shared)
        assert held >= blocks
