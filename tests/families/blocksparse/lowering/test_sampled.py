"""The kernel of the stored blocks of a dense product, run by threads of the host; which copies it
takes; and what NVRTC makes of it."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.epilogues import Add
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels.sdd import sampled
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import choose, mma
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Values
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse.emulated import GATES, Case, error
from tests.families.blocksparse.products import SampledOperands
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only
from tests.support.speeds import slow_but

ARCH, PROCESSORS = "sm_80", 108

# A product, whose columns are its depth, and how a, b and values lie.
CASES = {
    "16": (Case("float16", (16, 16), (9, 20), 0.3, 2, 2, 64), "rows", "rows", "rows"),
    "32": (Case("bfloat16", (32, 32), (5, 9), 0.4, 1, 2, 80), "rows", "columns", "rows"),
    "64": (Case("float16", (64, 64), (3, 4), 0.5, 2, 1, 96), "rows", "columns", "rows"),
    "128": (Case("float16", (128, 128), (2, 3), 0.6, 1, 1, 40), "columns", "rows", "rows"),
    "wide blocks": (Case("float16", (16, 128), (5, 3), 0.4, 2, 1, 48), "rows", "rows", "rows"),
    "tall blocks": (Case("bfloat16", (128, 32), (2, 5), 0.5, 1, 2, 16), "rows", "columns", "rows"),
    "half as wide": (Case("float16", (64, 32), (3, 6), 0.5, 2, 1, 136), "columns", "rows", "rows"),
    "float32": (Case("float32", (16, 16), (7, 12), 0.3, 2, 2, 36), "rows", "rows", "rows"),
    "float32, 64": (Case("float32", (64, 64), (2, 3), 0.6, 1, 1, 64), "rows", "columns", "rows"),
    "float32, 128": (Case("float32", (128, 128), (2, 2), 0.6, 1, 1, 24), "columns", "rows", "rows"),
    "tf32": (Case("tf32", (32, 32), (4, 6), 0.4, 2, 1, 44), "columns", "columns", "rows"),
    "odd depth": (Case("float16", (16, 16), (9, 20), 0.3, 1, 2, 33), "rows", "rows", "rows"),
    "depth 1": (Case("float16", (32, 16), (5, 9), 0.3, 2, 1, 1), "rows", "columns", "rows"),
    "apart": (Case("float16", (32, 32), (5, 9), 0.3, 2, 2, 130), "apart", "apart", "apart"),
    "float32 apart": (Case("float32", (16, 16), (5, 9), 0.3, 2, 2, 7), "apart", "apart", "columns"),
    "empty": (Case("float16", (32, 32), (5, 9), 0.0, 2, 2, 64), "rows", "rows", "rows"),
    "full": (Case("float16", (16, 16), (9, 9), 1.0, 1, 1, 64), "rows", "rows", "rows"),
}
FAST = ("16", "64", "wide blocks", "float32", "odd depth")


class Product(SampledOperands):
    """Operands of a case, and its result by this kernel."""

    def run(self, emulator, epilogue=(), scalars=(), parts=1, **beside) -> torch.Tensor:
        choice = {"parts": parts} if parts > 1 else {}

        def lower(problem: Sdd) -> Lowered:
            return sampled.SAMPLED.launch(epilogue, problem, Gpu(ARCH, PROCESSORS), choice)

        return self.launched(emulator, lower, scalars, **beside)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_products_are_right(case, emulator, seed):
    problem, *orders = CASES[case]
    made = Product(problem, *orders)
    assert error(made.run(emulator), made.wanted()) <= GATES[problem.numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_parts_of_sums_are_added_up(case, emulator, seed):
    """Of whole stages, the last one of what is left; the same bits each time."""
    problem, *orders = CASES[case]
    made = Product(problem, *orders)
    found = made.run(emulator, parts=3).clone()
    assert error(found, made.wanted()) <= GATES[problem.numbers]
    assert made.run(emulator, parts=3).equal(found)


@pytest.mark.emulated
@pytest.mark.parametrize("parts", slow_but((1, 2), (1, 2, 7)))
@pytest.mark.parametrize("numbers", slow_but(("float16",), ("float16", "float32")))
def test_epilogues_and_summands(numbers, parts, emulator, seed):
    """Slots that hold no block stay zeros."""
    case = Case(numbers, (16, 32), (9, 6), 0.3, 2, 2, 40 * parts)
    made = Product(case)
    y = torch.randn(2, made.layout.capacity, 32, 16).to(case.dtype).mT
    epilogue = (kl.Scale(), kl.Gelu(), Add())
    wanted = torch.nn.functional.gelu(1.5 * made.wanted())
    for beta in (0.5, 0.0):
        given = y if beta else torch.full_like(y, math.nan)
        found = made.run(emulator, epilogue, (1.5, beta), parts, summand0=given)
        whole = wanted + 0.5 * y.double() if beta else wanted
        whole[:, made.layout.nnz :] = 0
        assert error(found, whole) <= GATES[numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("numbers", slow_but(("float16",), ("float16", "float32")))
@pytest.mark.parametrize("depth", slow_but((40,), (40, 37)))
def test_what_is_not_of_a_block_does_not_count(depth, numbers, emulator, seed):
    """NaN in rows of a and columns of b that no block is of, and behind the depth."""
    case = Case(numbers, (16, 16), (9, 12), 0.3, 1, 1, depth)
    mask = torch.rand(1, *case.grid) < case.density
    mask[:, 2:4], mask[:, :, 5] = False, False
    made = Product(case, layout=Layout(mask, 16, int(mask.sum()) + 2))
    wanted = made.wanted()
    wide = torch.full((1, 1, 144, depth + 8), math.nan, dtype=case.dtype)
    made.a = wide[..., :depth].copy_(made.a)
    made.a[:, :, 32:64], made.b[..., 80:96] = math.nan, math.inf
    assert error(made.run(emulator), wanted) <= GATES[numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
def test_bits_depend_on_neither_batch_nor_layout(emulator, seed):
    case = Case("float16", (16, 16), (9, 20), 0.4, 1, 2, 72)
    made = Product(case)
    whole = made.layout.to_dense(made.run(emulator))
    less = made.layout.mask() & (torch.rand(1, *case.grid) < 0.5)
    part = Product(case._replace(batch=1), layout=Layout(less, 16))
    part.a, part.b = made.a[1:], made.b[1:]
    assert part.run(emulator).equal(part.layout.to_blocks(whole[1:]))


@pytest.mark.emulated
@pytest.mark.slow
def test_long_sums_of_float32_are_as_accurate_as_float32(emulator, seed):
    made = Product(Case("float32", (32, 32), (2, 2), 1.0, 1, 1, 8192), "rows", "columns", "rows")
    assert error(made.run(emulator), made.wanted()) <= GATES["float32"]


@pytest.mark.emulated
@pytest.mark.slow
def test_batches_beyond_a_grid_are_looped_over(emulator, monkeypatch, seed):
    monkeypatch.setattr(mma, "MOST_Y", 2)
    made = Product(Case("float16", (16, 16), (3, 5), 0.5, 2, 5, 16))
    assert error(made.run(emulator), made.wanted()) <= GATES["float16"]


BLOCKS = Blocks(64, 64, 64, 64, 1, 1000)
VALUES = Values(1000 * 4096, 4096, 64, 1)
ROWS, COLUMNS = Dense(0, 0, 128, 1), Dense(0, 0, 1, 128)


def problem(**changes) -> Sdd:
    given = Sdd("float16", "fp32", BLOCKS, 1, 128, ROWS, COLUMNS, VALUES)
    return given._replace(**changes)


def words(given: Sdd) -> list[str]:
    return only(choose.lower((), given, ARCH, PROCESSORS)).spec.description.split()


def test_wide_copies_are_chosen_only_where_every_one_is_aligned():
    wide = Dense(0, 0, 4096, 1)
    assert words(problem())[-1] == "depth/depth"
    assert words(problem(b=wide))[-1] == "depth/line"
    assert words(problem(a=Dense(0, 0, 1, 4096), b=wide))[-1] == "line/line"
    assert words(problem(depth=100))[-1] == "gather/gather"  # ends within a copy
    assert words(problem(depth=100, b=wide))[-1] == "gather/line"
    assert words(problem(a=ROWS._replace(alignment=8)))[-1] == "gather/depth"
    assert words(problem(batch=2, b=COLUMNS._replace(batch=4)))[-1] == "depth/gather"
    assert words(problem(a=ROWS._replace(line=100)))[-1] == "gather/depth"


def test_grids_hold_all_slots():
    assert only(choose.lower((), problem(batch=3), ARCH, 1)).grid == (500, 3)
    small = BLOCKS._replace(rows=16, cols=16)
    assert only(choose.lower((), problem(blocks=small), ARCH, 1)).grid == (125, 1)
    with pytest.raises(UnsupportedError, match="call it on slices"):
        choose.lower((), problem(depth=2**31), ARCH, 1)
    assert choose.candidates(problem(), ARCH) == [{"kind": "sampled"}]


def test_long_sums_of_few_blocks_are_in_parts():
    """Of whole stages of 32, and the blocks that a layout has room for."""
    few = problem(blocks=BLOCKS._replace(capacity=10), depth=6320)
    assert choose.default(few, PROCESSORS, ARCH) == {"kind": "sampled", "parts": 16}
    for enough in (problem(depth=6320), few._replace(depth=200), few._replace(batch=100)):
        assert "parts" not in choose.default(enough, PROCESSORS, ARCH)


SIZES = (16, 32, 64, 128)
COMPILED = {
    f"{dtype} {precision} {rows}x{cols} {a}/{b}": (dtype, precision, rows, cols, a, b)
    for dtype, precision in (("float16", "fp32"), ("float32", "fp32"), ("float32", "tf32"))
    for rows in SIZES
    for cols in SIZES
    for a, b in (("depth", "depth"), ("depth", "line"), ("gather", "gather"))
}


@pytest.mark.parametrize("case", slow_but(("float16 fp32 64x64 depth/line",), COMPILED))
def test_kernels_compile_without_spills(case):
    given = sampled.Sampled.Variant(*COMPILED[case])
    made = compiled(sampled.SAMPLED.spec((), given, "sm_90a"), "sm_90a")
    assert made.spilled == 0 and not made.serialized
    blocks = targets.resident_blocks("sm_90a", 32 * given.warps, made.registers, made.shared)
    assert blocks >= given.blocks


@pytest.mark.slow
@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_every_target_compiles(arch):
    for size in SIZES:
        given = sampled.Sampled.Variant("bfloat16", "fp32", size, size, "depth", "line")
        made = compiled(sampled.SAMPLED.spec((kl.Scale(), Add()), given, arch), arch)
        assert made.spilled == 0 and made.shared <= targets.SHARED_BYTES[arch]
