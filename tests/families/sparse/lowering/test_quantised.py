"""Products of bitmap matrices with values in fewer bits: what they take, and kernels for every
target."""

import pytest

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.jit import sources, targets
from tests.families.sparse.lowering.test_bitmap import HALF, fixed, problem
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

ARCHES = ("sm_90a", "sm_80", "sm_86", "sm_100", "sm_120")
EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())
every_format = pytest.mark.parametrize("name", QUANTISED)


@every_format
def test_what_they_take(name):
    for columns in (1, 8, 16):
        assert choose.takes(problem(columns=columns, largest=2624, name=name), "sm_90a")
    others = ({"columns": 17}, {"columns": 0}, {"dtype": "float32"}, {"rows": 0})
    for sizes in others:
        given = problem(**sizes, name=name)
        assert not choose.takes(given, "sm_90a")
        with pytest.raises(UnsupportedError, match=f"no {name} kernel multiplies"):
            choose.lower((), given, "sm_90a", 132)


@every_format
def test_lowering_chooses_of_the_variants(name):
    known = choose.variants(name, EPILOGUE, HALF, "sm_90a")
    code = QUANTISED[name]
    for columns in (1, 2, 8, 9, 16):
        for cols in (16, 2048, 28672):
            for largest in (code.offset, code.offset + code.most):
                given = problem(cols=cols, columns=columns, largest=largest, name=name)
                lowered = choose.lower(EPILOGUE, given, "sm_90a", 132)
                assert all(step.spec in known for step in lowered.steps)
                assert code.values in lowered.steps[0].spec.description
                assert fixed(lowered.steps[0])["stages"] == 2  # a ring holds no fewer, and no more
                early = choose.lower(EPILOGUE, given._replace(frozen=True), "sm_90a", 132)
                assert early.steps[0].overlaps and not lowered.steps[0].overlaps


def test_16_bit_sources_say_nothing_of_codes():
    for spec in choose.variants("bitmap", EPILOGUE, HALF, "sm_90a"):
        assert "INT8" not in spec.source and "int8" not in spec.description


def cases():
    """Name to (spec, arch): of every target all variants, beside sm_90a of one dtype."""
    found = {}
    for arch in ARCHES:
        dtypes = HALF if arch == "sm_90a" else HALF[:1]
        for name in QUANTISED:
            for spec in choose.variants(name, EPILOGUE, dtypes, arch):
                found[f"{arch} {spec.description}"] = spec, arch
    return found


CASES = cases()
FAST = one_of_each(
    lambda case: (stem(case[0]), case[1] == "sm_90a", case[0].description.split(" ")[3]), CASES
)


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_every_variant_compiles_without_spills(name):
    made = compiled(*CASES[name])
    assert made.spilled <= 64 and made.registers <= 255


# Instructions of the kernels that a single vector of float16 takes on an H200, by NVRTC of CUDA
# 13.0, which makes up to 7 % more of them than that of 13.5: 1504 of int8.
MOST = {"int8": 1520, "fp8": 1520, "int4": 1530}


@pytest.mark.parametrize("codes", MOST)
def test_decoding_takes_few_instructions(codes):
    given = problem(largest=2624, name=f"bitmap-{codes}")
    lowered = choose.lower((), given, "sm_90a", 132)
    made = compiled(lowered.steps[0].spec, "sm_90a")
    assert made.instructions <= MOST[codes] and not made.spilled and made.registers <= 72


@pytest.mark.few(1)
@pytest.mark.parametrize("arch", slow_but(("sm_90a",), targets.SHARED_BYTES))
def test_packing_kernels_compile_for_every_target(arch):
    for name in QUANTISED:
        for spec in choose.codec_specs(name, (*HALF, "float32")):
            made = compiled(spec, arch)
            assert not made.spilled and not sources.system_includes(spec.source)
