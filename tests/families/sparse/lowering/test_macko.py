"""Which kernels a product with a matrix in MACKO's format takes, and that NVRTC takes them."""

from itertools import product

import pytest

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.sparse.kernels.macko import macko as kernels
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, facts_of
from kernlib.jit import targets
from kernlib.jit.compiler import compile_spec
from tests.support.kernels import stem
from tests.support.speeds import slow_but

SMS = 132
EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())


def problem(rows=4096, cols=4096, columns=1, dtype="float16", **facts):
    """One whose rows are equal, of density 0.1, unless ``facts`` say otherwise."""
    each = cols // 8
    known = {"entries": each * rows // 8 * 8, "longest": each, "busiest": each * min(32, rows)}
    sizes = rows, cols, columns, dtype, -(-cols // 8) * 8, True, (rows, 1)
    return Problem(*sizes, facts_of(known | facts), "macko")


def lowered(given, arch="sm_90a", epilogue=()):
    assert choose.takes(given, arch)
    return choose.lower(epilogue, given, arch, SMS)


def test_equal_rows_take_one_launch_of_whole_rows():
    for rows, ctas in ((1, 1), (100, 100), (4096, 128), (8192, 131), (12288, 131), (200000, 396)):
        found = lowered(problem(rows=rows))
        (step,) = found.steps
        assert step.grid == (ctas, 1) and found.workspace == 0
        assert step.pointers == tuple((n, 0) for n in ("values", "deltas", "row_ptr", "x", "out"))


@pytest.mark.parametrize(
    "given",
    (
        problem(longest=4096, busiest=100_000),
        problem(rows=3, cols=65536, longest=65536, busiest=3 * 65536, entries=3 * 65536),
        problem(rows=100_000, entries=65536, longest=65536, busiest=65536, cols=65536),
    ),
)
def test_unequal_or_few_rows_are_divided_by_entries(given):
    first, second = (stem(step.spec) for step in lowered(given, epilogue=EPILOGUE).steps)
    assert (first, second) == ("sparse_macko", "sparse_macko_sum")
    found = lowered(given._replace(columns=3), epilogue=EPILOGUE)
    main, last = found.steps
    assert main.grid[0] == SMS and last.overlaps and main.scalars == 0 and last.scalars == 1
    parts = SMS * main.spec.threads // 32
    assert found.workspace == 4 * 3 * (given.rows + parts)
    assert last.pointers[-1] == ("vector0", 0)
    assert not lowered(given, "sm_80").steps[1].overlaps


def test_shared_memory_fits_every_target():
    for arch, dtype, columns in product(targets.SHARED_BYTES, ("float16", "float32"), (1, 4, 16)):
        for cols in (1, 20000, 49152, 300_000):
            (step,) = lowered(problem(cols=cols, dtype=dtype, columns=columns), arch).steps
            together = kernels.variant_of(
                problem(cols=cols, dtype=dtype, columns=columns), arch, False
            )
            static = kernels.static_bytes(together)
            assert step.spec.shared_bytes + static <= targets.SHARED_BYTES[arch]
            assert step.grid[1] == -(-columns // together.columns)


def test_every_choice_is_a_variant():
    for arch, dtype in (("sm_90a", "float16"), ("sm_86", "bfloat16"), ("sm_80", "float32")):
        known = {
            epilogue: set(choose.variants("macko", epilogue, (dtype,), arch))
            for epilogue in ((), EPILOGUE)
        }
        sizes = product((1, 5000), (40, 9000, 49152, 300_000), (1, 2, 3, 7, 16), (False, True))
        for (rows, cols, columns, skewed), epilogue in product(sizes, known):
            facts = {"longest": 2**22, "busiest": 2**22} if skewed else {}
            for wide in ({}, {"entries": 2**33}):
                given = problem(rows, cols, columns, dtype, **(facts | wide))
                for step in lowered(given, arch, epilogue).steps:
                    assert step.spec in known[epilogue]


def test_what_is_not_taken():
    for given in (
        problem(columns=17),
        problem(columns=0),
        problem(dtype="float64"),
        problem(rows=2**31),
        problem()._replace(rows=0),
        problem()._replace(cols=0),
    ):
        assert not choose.takes(given, "sm_90a")
        with pytest.raises(UnsupportedError, match="no macko kernel multiplies a"):
            choose.lower((), given, "sm_90a", SMS)


CASES = {
    "one vector": (problem(), (), "sm_90a"),
    "epilogue": (problem(), EPILOGUE, "sm_90a"),
    "8 vectors": (problem(columns=8), EPILOGUE, "sm_90a"),
    "float32": (problem(columns=4, dtype="float32"), (), "sm_90a"),
    "bfloat16, x in device memory": (problem(cols=300_000, dtype="bfloat16"), (), "sm_90a"),
    "ranges": (problem(longest=4096, busiest=100_000, entries=2**31), EPILOGUE, "sm_90a"),
    **{arch: (problem(columns=2), EPILOGUE, arch) for arch in ("sm_80", "sm_86", "sm_120")},
}


@pytest.mark.parametrize("name", slow_but(("one vector", "ranges"), CASES))
def test_kernels_compile_without_spills(name):
    given, epilogue, arch = CASES[name]
    for step in lowered(given, arch, epilogue).steps:
        meta = compile_spec(step.spec, arch).meta
        assert int(meta["registers"]) <= 65536 // step.spec.threads // 8 * 8
        assert int(meta["spill_bytes"]) == 0
