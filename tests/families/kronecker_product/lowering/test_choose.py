"""What lowering makes of sizes: runs of factors, tiles, grids, and kernels that compile."""

import math

import pytest

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.lowering import choose, grouping
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout, Problem
from kernlib.jit import compiler, targets
from tests.support.speeds import slow_but

# Rows and factors of one size, as the benchmark has them.
SHAPES = {
    "1024 8^5": (1024, ((8, 8),) * 5),
    "1024 16^4": (1024, ((16, 16),) * 4),
    "1024 32^3": (1024, ((32, 32),) * 3),
    "1024 64^2": (1024, ((64, 64),) * 2),
    "1024 128^2": (1024, ((128, 128),) * 2),
    "1024 8^6": (1024, ((8, 8),) * 6),
    "1024 64^3": (1024, ((64, 64),) * 3),
    "320 128^3": (320, ((128, 128),) * 3),
    "1024 32^4": (1024, ((32, 32),) * 4),
    "20 2^7": (20, ((2, 2),) * 7),
    "mixed": (100, ((5, 3), (7, 11))),
}
NUMBERS = {
    "fp32": ("float32", "fp32"),
    "tf32": ("float32", "tf32"),
    "fp16": ("float16", "fp32"),
    "fp64": ("float64", "fp32"),
}


def problem(rows, sizes, numbers="fp32", inside=False):
    factors = tuple(Factor(p, q, q, 1) for p, q in sizes)
    wide, out = (math.prod(size[side] for size in sizes) for side in (0, 1))
    layouts = [Layout(0, 0, 1, rows) if inside else Layout(0, 0, n, 1) for n in (wide, out)]
    return Problem(1, rows, inside, factors, *layouts, *NUMBERS[numbers])


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_launches_fit_every_gpu(shape, numbers, inside, arch):
    given = problem(*SHAPES[shape], numbers, inside)
    sizes = SHAPES[shape][1]
    if not choose.takes(sizes, given.dtype, arch):
        assert max(sizes[0]) == 128 and targets.SHARED_BYTES[arch] < 128 * 1024
        with pytest.raises(UnsupportedError, match="128 x 128"):
            choose.runs(given, arch)
        return
    lowered = choose.lower((), given, arch, targets.MULTIPROCESSORS[arch][1])
    assert ("x", 0) in sum((step.pointers for step in lowered.steps[:2]), ())
    assert "out" in [name for name, _ in lowered.steps[-1].pointers]
    assert ("out", 0) in sum((step.pointers for step in lowered.steps), ())
    for step in lowered.steps:
        assert step.spec.shared_bytes <= targets.SHARED_BYTES[arch]
        assert 32 <= step.spec.threads <= 1024 and step.grid[0] >= 1
    names = [name for step in lowered.steps for name, _ in step.pointers if "factor" in name]
    assert set(names) == {f"factor{index}" for index in range(len(sizes))}
    assert len({names.count(name) for name in names}) == 1  # once for each part of the rows


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_do_not_depend_on_the_rows(shape):
    """So a row's bits do not either."""
    sizes = SHAPES[shape][1]
    found = {choose.runs(problem(rows, sizes), "sm_90a") for rows in (1, 7, 1024, 1 << 30)}
    assert len(found) == 1
    modes = [grouping.modes(sizes, columns) for columns in (1, 8)]
    assert [mode[1:3] for mode in modes[0]] == [mode[1:3] for mode in modes[1]]


def kinds(shape, numbers, rows=None, inside=False):
    own, sizes = {**SHAPES, "24^4": (1024, ((24, 24),) * 4)}[shape]
    lowered = choose.lower((), problem(rows or own, sizes, numbers, inside), "sm_90a", 132)
    return [step.spec.description.split()[1] for step in lowered.steps]


def test_rows_that_fit_take_one_pass_others_one_launch():
    """Multiples of 8 by tiles of half-precision numbers, one of which float32 is two; the rest by
    slabs that need memory for a few of them alone. Few rows of these are handed on as a whole."""
    assert kinds("mixed", "fp32") == kinds("mixed", "fp16") == kinds("1024 64^2", "fp64")
    assert kinds("mixed", "fp32") == ["modes"]
    assert kinds("20 2^7", "fp16") == ["halves"] and kinds("20 2^7", "fp32") == ["pairs"]
    for shape in ("1024 16^4", "1024 8^6", "320 128^3"):
        assert kinds(shape, "fp64") == ["clear", "slabs"]
        assert kinds(shape, "fp64", rows=5) == ["modes"] * len(kinds(shape, "fp64", rows=5))
    for rows in (1, 100, 1024):
        assert kinds("24^4", "tf32", rows) == (["modes"] * 2 if rows == 1 else ["clear", "slabs"])
        assert kinds("24^4", "fp16", rows) == ["clear", "half_slabs"]
        assert kinds("24^4", "fp32", rows) == ["clear", "pair_slabs"]


@pytest.mark.parametrize("numbers", ["fp32", "tf32", "fp16"])
def test_powers_of_two_are_multiplied_by_wgmma(numbers):
    """On Hopper, with few rows as with many; in one launch, but on the left and for factors of
    128."""
    for rows in (1, 1024):
        for shape in ("1024 64^2", "1024 128^2"):
            assert kinds(shape, numbers, rows) == ["hopper"]
        bounds = ["clear", "largest"] * (numbers == "fp16")
        assert kinds("1024 128^2", numbers, rows, inside=True) == bounds + ["hopper"] * 2
        for shape in ("1024 8^6", "1024 64^3"):
            assert kinds(shape, numbers, rows) == ["clear", "hopper_slabs"]
            assert kinds(shape, numbers, rows, inside=True) == bounds + ["hopper"] * 3
        assert kinds("320 128^3", numbers, rows) == bounds + ["hopper"] * 2
    elsewhere = choose.lower((), problem(*SHAPES["1024 64^2"], numbers), "sm_100", 132)
    assert "hopper" not in elsewhere.steps[0].spec.description


@pytest.mark.parametrize("numbers", ["fp32", "fp16"])
def test_what_is_faster_without_wgmma_is_left_to_others(numbers):
    """Rows that a block keeps whole, but for one pass, and of halves two of columns; and narrow
    matrices."""
    one, slabs = ("halves", "half_slabs") if numbers == "fp16" else ("pairs", "pair_slabs")
    for shape in ("1024 8^5", "1024 32^3"):
        assert kinds(shape, numbers) == [one]
        assert kinds(shape, numbers, inside=True)[-3:] == ["hopper"] * 3
    assert kinds("1024 16^4", numbers) == ([one] if numbers == "fp16" else ["clear", slabs])
    assert kinds("1024 16^4", numbers, inside=True)[-4:] == ["hopper"] * 4
    assert kinds("1024 64^2", numbers, inside=True)[-1] == ("hopper" if one == "halves" else one)
    for inside in (False, True):
        assert kinds("1024 32^4", numbers, inside=inside) == ["clear", slabs]


def test_few_tiles_are_of_as_many_blocks():
    for rows, blocks in ((1, 1), (70, 70), (1000, 132)):
        (step,) = choose.lower((), problem(rows, ((64, 64),) * 2), "sm_90a", 132).steps
        assert step.grid == (blocks, 1)


@pytest.mark.parametrize("numbers", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_lies_between_two_passes_takes_little_memory(shape, numbers):
    """By wgmma counters, exponents and largest numbers, or what goes on between tiles that are
    computed at a time."""
    rows, sizes = SHAPES[shape]
    for inside in (False, True):
        lowered = choose.lower((), problem(rows, sizes, numbers, inside), "sm_90a", 132)
        is_hopper = "hopper" in lowered.steps[-1].spec.description
        assert lowered.workspace <= (1 << 20 if is_hopper else 400 << 20 if inside else 64 << 20)


def test_modes_take_the_fewest_operations():
    """The one that shortens rows most comes first, and sizes follow what is applied."""
    made = grouping.modes(((20, 40), (40, 20)))
    assert made[0].rows == 40 and made[0].left == 20 and made[1].right == 20
    assert (
        sum(mode.terms for mode in made)
        < sum(mode.terms for mode in grouping.modes(((40, 20), (20, 40)))[::-1]) * 2
    )
    merged = grouping.modes(((2, 2),) * 7)
    assert [(mode.rows, mode.parts) for mode in merged] == [(8, 3), (16, 4)]


CALLS = {
    f"{shape} {numbers} {side}": (shape, numbers, side == "left")
    for shape in SHAPES
    for numbers in NUMBERS
    for side in ("right", "left")
}


@pytest.mark.parametrize("call", slow_but(("mixed fp32 right",), CALLS))
def test_kernels_compile_without_spills(call):
    shape, numbers, inside = CALLS[call]
    for step in choose.lower((), problem(*SHAPES[shape], numbers, inside), "sm_90a", 132).steps:
        made = compiler.compile_spec(step.spec, "sm_90a")
        assert int(made.meta["spill_bytes"]) <= SPILLS.get(call, 0)


# What is kept between tiles, or between the steps of one, matrices before the first tile, and
# largest numbers of columns beside all sums: none is in a loop over fragments.
SPILLS = {
    **{f"1024 {each} fp16 left": 32 for each in ("8^5", "16^4", "32^3", "64^2", "8^6", "64^3")},
    "1024 16^4 fp32 right": 32,
    "1024 32^3 fp32 right": 32,
    "1024 32^3 tf32 right": 152,
    "1024 32^4 fp32 right": 48,
    "1024 32^4 fp32 left": 12,
    "1024 128^2 fp16 right": 8,
    "320 128^3 fp16 right": 8,
    "1024 64^2 fp32 left": 212,
    "1024 64^2 fp64 left": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [((5, 3), (7, 11)), ((16, 8), (8, 24))], ids=["odd", "chunks"])
@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_every_target_compiles(arch, sizes):
    for numbers in NUMBERS:
        for step in choose.lower((), problem(100, sizes, numbers), arch, 132).steps:
            assert compiler.compile_spec(step.spec, arch).cubin
