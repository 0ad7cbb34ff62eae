"""The kernel of products with few columns, run by threads of the host; what it takes; and what
NVRTC makes of it."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.epilogues import Add
from kernlib.families.blocksparse.kernels.spmm import decode
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import choose, mma
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Spmm, Values
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse.emulated import GATES, Case, error
from tests.families.blocksparse.products import Operands
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only
from tests.support.speeds import slow_but

ARCH = "sm_90a"
DECODE = decode.Decode()

# A product, the warps of its CTAs, and how its result lies.
CASES = {
    "16": (Case("float16", (16, 16), (5, 37), 0.4, 2, 2, 5), 4, "rows"),
    "16, an odd block": (Case("float16", (16, 16), (2, 9), 1.0, 1, 1, 8), 4, "columns"),
    "32": (Case("bfloat16", (32, 32), (3, 40), 0.5, 1, 2, 16), 8, "columns"),
    "64": (Case("float16", (64, 64), (3, 21), 0.4, 2, 1, 11), 4, "columns"),
    "128": (Case("float16", (128, 128), (2, 9), 0.6, 1, 1, 1), 16, "rows"),
    "wide blocks": (Case("float16", (16, 128), (3, 9), 0.5, 1, 2, 3), 4, "apart"),
    "tall blocks": (Case("bfloat16", (64, 16), (3, 40), 0.4, 2, 1, 9), 8, "rows"),
    "many words": (Case("float16", (32, 16), (2, 700), 0.1, 1, 1, 16), 4, "columns"),
    "empty": (Case("float16", (32, 32), (3, 5), 0.0, 2, 1, 4), 4, "rows"),
}


class Product(Operands):
    """Operands of a case, and its result by this kernel."""

    def __init__(self, case: Case, out_order: str = "columns", layout: Layout | None = None):
        super().__init__(case, "columns", out_order, layout)

    def run(self, emulator, warps=4, epilogue=(), scalars=(), **beside) -> torch.Tensor:
        def lower(problem: Spmm) -> Lowered:
            assert DECODE.takes(problem, ARCH)
            return DECODE.launch(epilogue, problem, Gpu(ARCH, 1), {"warps": warps})

        return self.launched(emulator, lower, scalars, **beside)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(("16", "64"), CASES))
def test_products_are_right(case, emulator, seed):
    problem, warps, out_order = CASES[case]
    made = Product(problem, out_order)
    assert error(made.run(emulator, warps), made.wanted()) <= GATES[problem.numbers]


@pytest.mark.emulated
def test_bits_depend_on_neither_columns_nor_batch(emulator, seed):
    case = Case("float16", (32, 32), (2, 30), 0.6, 1, 2, 16)
    made = Product(case)
    whole = made.run(emulator, 8).clone()
    for columns in (8, 3):
        part = Product(case._replace(columns=columns, batch=1), layout=made.layout)
        part.values, part.dense = made.values[1:], made.dense[1:, :, :, :columns]
        assert part.run(emulator, 8).equal(whole[1:, :, :, :columns])


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("order", slow_but(("columns",), ("rows", "columns")))
def test_epilogues_and_summands(order, emulator, seed):
    """A bias for each line; summands in other strides than the result; rows without blocks too."""
    case = Case("float16", (16, 16), (9, 12), 0.2, 2, 2, 6)
    made = Product(case, order)
    bias, y = torch.randn(9 * 16).half(), torch.randn(2, 2, 9 * 16, 6).half()
    wanted = torch.nn.functional.gelu(made.wanted() + bias.double()[:, None])
    for beta, rest in ((0.5, 0.5 * y.double()), (0.0, 0.0)):
        given = y if beta else torch.full_like(y, math.nan)
        epilogue = (kl.Bias(), kl.Gelu(), Add())
        found = made.run(emulator, 4, epilogue, (beta,), vector0=bias, summand0=given)
        assert error(found, wanted + rest) <= 1e-3


@pytest.mark.emulated
def test_what_no_block_meets_does_not_count(emulator, seed):
    """Infinities where dense meets no block of a line."""
    case = Case("float16", (16, 16), (8, 12), 0.25, 1, 1, 7)
    made = Product(case)
    column = int(made.layout.mask()[0].nonzero()[0, 1])
    wanted = made.wanted()
    made.dense[:, :, column * 16] = math.inf
    found = made.run(emulator)
    meets = made.layout.mask()[0, :, column].repeat_interleave(16)
    assert meets.any() and not meets.all()
    assert not found[0, 0, meets].isfinite().any()
    assert error(found[0, 0, ~meets], wanted[0, 0, ~meets]) <= 1e-3


@pytest.mark.emulated
@pytest.mark.slow
def test_batches_beyond_a_grid_are_looped_over(emulator, monkeypatch, seed):
    monkeypatch.setattr(mma, "MOST_Y", 2)
    made = Product(Case("float16", (16, 16), (3, 5), 0.5, 2, 5, 16))
    assert error(made.run(emulator), made.wanted()) <= GATES["float16"]


BLOCKS = Blocks(64, 64, 128, 128, 1, 8192)
VALUES = Values(8192 * 4096, 4096, 64, 1)
DEEP, ACROSS = Dense(0, 0, 1, 8192), Dense(0, 0, 16, 1)  # along the depth, along the columns


def problem(**changes) -> Spmm:
    given = Spmm("float16", "fp32", BLOCKS, 1, 16, False, VALUES, DEEP, DEEP)
    return given._replace(**changes)


def kind(given: Spmm, arch=ARCH) -> str:
    return choose.default(given, 132, arch)["kind"]


REFUSED = {
    "more columns": {"columns": 17},
    "float32": {"dtype": "float32"},
    "a transpose": {"transposed": True},
    "columns side by side": {"dense": ACROSS},
    "an odd pitch": {"dense": DEEP._replace(column=8193)},
    "an odd address": {"dense": DEEP._replace(alignment=2)},
    "blocks by columns": {"values": VALUES._replace(row=1, column=64)},
    "blocks at odd places": {"values": VALUES._replace(slot=4097)},
    "a depth beyond an int": {"blocks": BLOCKS._replace(grid_cols=2**24)},
}


def test_few_columns_along_the_depth_are_taken_on_every_gpu():
    for arch in ("sm_80", "sm_90", "sm_90a", "sm_120"):
        assert kind(problem(), arch) == kind(problem(columns=1), arch) == "decode"
    assert kind(problem(columns=1, dense=DEEP._replace(column=3))) == "decode"  # of one column


@pytest.mark.parametrize("case", REFUSED)
def test_all_else_is_left_to_others(case):
    given = problem(**REFUSED[case])
    assert not DECODE.takes(given, ARCH)
    assert kind(given) == "portable"


def test_warps_are_as_many_as_multiprocessors_need():
    def warps(rows, **changes):
        given = problem(blocks=BLOCKS._replace(grid_rows=rows), **changes)
        return only(choose.lower((), given, ARCH, 132)).spec.threads // 32

    assert [warps(rows) for rows in (128, 64, 32, 1)] == [4, 8, 16, 16]
    assert warps(64, batch=9) == 8  # which would change a result's bits


COMPILED = {
    f"{dtype} {lines}x{depth} {columns} {warps}": (dtype, lines, depth, columns, warps, True)
    for dtype in ("float16", "bfloat16")
    for lines, depth in ((16, 16), (32, 32), (64, 64), (128, 128), (16, 128))
    for columns in decode.COLUMNS
    for warps in decode.WARPS
}


@pytest.mark.parametrize("case", slow_but(("float16 16x16 16 4", "float16 64x64 8 16"), COMPILED))
def test_kernels_compile_without_spills(case):
    spec = DECODE.spec((kl.Bias(), kl.Gelu(), Add()), DECODE.Variant(*COMPILED[case]), ARCH)
    made = compiled(spec, ARCH)
    assert made.spilled == 0
    blocks = targets.resident_blocks(ARCH, spec.threads, made.registers, made.shared)
    assert blocks * spec.threads // 32 >= 16


@pytest.mark.slow
@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_every_target_compiles(arch):
    for case in ("float16 16x16 16 4", "bfloat16 128x128 8 16"):
        assert compiled(DECODE.spec((), DECODE.Variant(*COMPILED[case]), arch), arch).spilled == 0
