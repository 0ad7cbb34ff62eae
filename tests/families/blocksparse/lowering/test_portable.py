"""The portable kernel of products with block-sparse matrices, run by threads of the host; which
tiles and copies it takes; and what NVRTC makes of it."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.descriptors.epilogues import Add
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels import parts
from kernlib.families.blocksparse.kernels.spmm import portable
from kernlib.families.blocksparse.lowering import choose, mma
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Spmm, Values
from kernlib.jit import targets
from kernlib.lowering import kernel, product_source
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse.emulated import GATES, Case, error
from tests.families.blocksparse.products import Operands
from tests.support.compiled_kernels import compiled
from tests.support.kernels import only
from tests.support.speeds import slow_but

ARCH, PROCESSORS = "sm_80", 1
KIND = {"kind": "portable"}

# A product, its tile's columns, and how dense and result lie.
CASES = {
    "16": (Case("float16", (16, 16), (11, 40), 0.3, 2, 2, 130), 128, "rows", "rows"),
    "32": (Case("float16", (32, 32), (5, 12), 0.3, 1, 2, 72), 64, "rows", "rows"),
    "64": (Case("bfloat16", (64, 64), (3, 7), 0.3, 2, 1, 33), 32, "columns", "rows"),
    "128": (Case("float16", (128, 128), (3, 3), 0.6, 1, 1, 7), 16, "rows", "columns"),
    "transposed": (Case("float16", (16, 16), (40, 11), 0.3, 2, 2, 64, True), 64, "rows", "rows"),
    "transposed 32": (
        Case("float16", (32, 32), (9, 5), 0.3, 1, 1, 16, True), 16, "columns", "rows",
    ),
    "transposed 128": (
        Case("bfloat16", (128, 128), (3, 3), 0.6, 2, 1, 130, True), 128, "columns", "columns",
    ),
    "wide blocks": (Case("float16", (16, 128), (9, 4), 0.4, 2, 1, 40), 128, "rows", "columns"),
    "tall blocks": (Case("float16", (64, 16), (3, 20), 0.4, 1, 2, 24), 32, "rows", "rows"),
    "wide blocks, transposed": (
        Case("bfloat16", (32, 64), (4, 5), 0.4, 2, 1, 24, True), 64, "rows", "rows",
    ),
    "float32": (Case("float32", (16, 16), (7, 20), 0.3, 2, 2, 33), 64, "columns", "rows"),
    "float32 by depth": (Case("float32", (32, 32), (4, 6), 0.4, 1, 1, 64), 32, "rows", "rows"),
    "float32, transposed": (
        Case("float32", (64, 64), (3, 3), 0.5, 1, 2, 130, True), 64, "rows", "columns",
    ),
    "tf32": (Case("tf32", (16, 16), (9, 20), 0.3, 1, 1, 136), 128, "rows", "rows"),
    "tf32, transposed": (Case("tf32", (128, 64), (2, 3), 0.6, 2, 1, 16, True), 16, "rows", "rows"),
    "apart": (Case("float16", (16, 16), (9, 20), 0.3, 2, 2, 33), 64, "apart", "apart"),
    "float32 apart": (Case("float32", (32, 16), (4, 9), 0.3, 2, 2, 7), 16, "apart", "apart"),
    "empty": (Case("float16", (32, 32), (5, 12), 0.0, 2, 2, 33), 64, "rows", "rows"),
    "full": (Case("float16", (16, 16), (9, 9), 1.0, 1, 1, 64), 64, "rows", "rows"),
    "one column": (Case("float16", (64, 32), (3, 5), 0.5, 2, 1, 1), 16, "rows", "rows"),
    "many words": (Case("float16", (16, 16), (2, 700), 0.004, 1, 1, 8), 16, "rows", "rows"),
    "many words, transposed": (
        Case("float16", (16, 16), (700, 10), 0.004, 1, 1, 8, True), 128, "rows", "rows",
    ),
}  # fmt: skip
Variant = portable.Portable.Variant
FAST = ("16", "transposed", "wide blocks", "float32", "apart")


class Product(Operands):
    """Operands of a case, and its result by this kernel."""

    def run(self, emulator, columns=None, epilogue=(), scalars=(), parts=1, **beside):
        """By a tile of so many columns and so many parts of the depth."""
        choice = None if columns is None else {"columns": columns, "parts": parts}

        def lower(problem: Spmm) -> Lowered:
            gpu = Gpu(ARCH, PROCESSORS)
            option = kernel.choose((portable.PORTABLE,), problem, gpu)
            return portable.PORTABLE.launch(epilogue, problem, gpu, choice or option.knobs)

        return self.launched(emulator, lower, scalars, **beside)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_products_are_right(case, emulator, seed):
    problem, columns, order, out_order = CASES[case]
    made = Product(problem, order, out_order)
    found = made.run(emulator, columns)
    assert error(found, made.wanted()) <= GATES[problem.numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but((*FAST, "many words"), CASES))
def test_parts_of_sums_are_added_up(case, emulator, seed):
    """Parts of whole blocks of the depth, of which some store nothing; the same bits each time."""
    problem, columns, order, out_order = CASES[case]
    made = Product(problem, order, out_order)
    found = made.run(emulator, columns, parts=3).clone()
    assert error(found, made.wanted()) <= GATES[problem.numbers]
    assert made.run(emulator, columns, parts=3).equal(found)


@pytest.mark.emulated
@pytest.mark.parametrize("transposed", slow_but((False,), (False, True)))
def test_values_may_lie_in_any_way(transposed, emulator, seed):
    case = Case("float16", (16, 32), (9, 5), 0.4, 1, 2, 24, transposed)
    made = Product(case)
    wanted = made.wanted()
    first = made.run(emulator, 64).clone()
    assert error(first, wanted) <= GATES["float16"]
    made.values = made.values.mT.contiguous().mT
    assert made.run(emulator, 64).equal(first)
    wide = torch.zeros(2, made.layout.capacity, 16, 65).half()
    made.values = wide[..., 1::2].copy_(made.values)
    assert made.run(emulator, 64).equal(first)
    made.values = made.values[:1].contiguous().expand(2, -1, -1, -1)  # one for all
    assert error(made.run(emulator, 64), made.wanted()) <= GATES["float16"]


@pytest.mark.emulated
@pytest.mark.parametrize("numbers", slow_but(("float16",), ("float16", "float32")))
def test_bits_depend_on_neither_columns_nor_batch(numbers, emulator, seed):
    """Whatever the tile."""
    case = Case(numbers, (16, 16), (5, 140), 0.2, 1, 2, 130)
    made = Product(case)
    whole = made.run(emulator, 64).clone()
    for columns, tile in ((130, 32), (9, 16), (1, 16)):
        part = Product(case._replace(columns=columns, batch=1), layout=made.layout)
        part.values, part.dense = made.values[1:], made.dense[1:, :, :, :columns]
        assert part.run(emulator, tile).equal(whole[1:, :, :, :columns])


@pytest.mark.emulated
@pytest.mark.parametrize("parts", slow_but((1, 2), (1, 2, 5)))
@pytest.mark.parametrize("numbers", slow_but(("float16",), ("float16", "bfloat16", "float32")))
@pytest.mark.parametrize("order", slow_but(("rows",), ("rows", "columns")))
def test_epilogues_and_summands(numbers, order, parts, emulator, seed):
    """A bias for each line; summands in other strides than the result; rows without blocks too."""
    case = Case(numbers, (16, 16), (9, 12), 0.2, 2, 2, 40)
    made = Product(case, order, order)
    bias = torch.randn(9 * 16).to(case.dtype)
    y = torch.randn(2, 2, 40, 9 * 16).to(case.dtype).mT
    epilogue = (kl.Bias(), kl.Gelu(), Add())
    wanted = torch.nn.functional.gelu(made.wanted() + bias.double()[:, None])
    for beta, rest in ((0.5, 0.5 * y.double()), (0.0, 0.0)):
        given = y if beta else torch.full_like(y, math.nan)
        found = made.run(emulator, 64, epilogue, (beta,), parts, vector0=bias, summand0=given)
        assert error(found, wanted + rest) <= GATES[numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
def test_a_summand_may_be_the_result(emulator, seed):
    made = Product(Case("float16", (16, 16), (9, 12), 0.3, 1, 1, 40))
    made.out.copy_(torch.randn(made.out.shape))
    wanted = made.wanted() - made.out.double()
    assert error(made.run(emulator, 64, (Add(),), (-1.0,), summand0=made.out), wanted) <= 1e-3


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("numbers", slow_but(("float16",), ("float16", "float32")))
def test_what_no_block_meets_does_not_count(numbers, emulator, seed):
    """NaN where dense meets no block of a line, in slots that hold none, and in columns of dense
    that are not there."""
    case = Case(numbers, (16, 16), (8, 12), 0.25, 1, 1, 33)
    made = Product(case)
    wanted, mask = made.wanted(), made.layout.mask()[0]
    column = int(mask.nonzero()[0, 1])
    wide = torch.full((1, 1, made.dense.shape[2], 40), math.nan, dtype=case.dtype)
    made.dense = wide[..., :33].copy_(made.dense)
    made.dense[:, :, column * 16] = math.inf
    found = made.run(emulator, 64)
    meets = mask[:, column].repeat_interleave(16)
    assert meets.any() and not meets.all()
    assert not found[0, 0, meets].isfinite().any()
    assert error(found[0, 0, ~meets], wanted[0, 0, ~meets]) <= GATES[numbers]


@pytest.mark.emulated
@pytest.mark.slow
def test_long_sums_of_float32_are_as_accurate_as_float32(emulator, seed):
    made = Product(Case("float32", (32, 32), (2, 256), 1.0, 1, 1, 32))
    assert error(made.run(emulator, 32), made.wanted()) <= GATES["float32"]


@pytest.mark.emulated
@pytest.mark.slow
def test_batches_beyond_a_grid_are_looped_over(emulator, monkeypatch, seed):
    monkeypatch.setattr(mma, "MOST_Y", 2)
    made = Product(Case("float16", (16, 16), (3, 5), 0.5, 2, 5, 16))
    assert error(made.run(emulator, 16), made.wanted()) <= GATES["float16"]


BLOCKS = Blocks(64, 64, 64, 64, 1, 1000)
VALUES = Values(1000 * 4096, 4096, 64, 1)
ROWS = Dense(0, 0, 4096, 1)


def problem(**changes) -> Spmm:
    given = Spmm("float16", "fp32", BLOCKS, 1, 4096, False, VALUES, ROWS, ROWS)
    return given._replace(**changes)


def words(given: Spmm, processors=132) -> list[str]:
    return only(choose.lower((), given, ARCH, processors)).spec.description.split()


def taken(given: Spmm, processors=132) -> tuple[int, int]:
    """Columns of a tile, and parts of sums."""
    found = choose.default(given, processors, ARCH)
    return found["columns"], found.get("parts", 1)


def test_few_columns_take_small_tiles():
    """And where these are still few, several blocks of threads a tile."""
    tiles = {4096: (128, 1), 128: (32, 1), 64: (32, 2), 16: (16, 4), 1: (16, 4)}
    assert {n: taken(problem(columns=n)) for n in tiles} == tiles
    assert taken(problem(columns=128), processors=16) == (128, 1)
    assert taken(problem(columns=64), processors=16) == (64, 2)
    known = choose.candidates(problem(columns=128), ARCH)
    whole, split = known[:4], known[4:]
    assert whole == [{**KIND, "columns": columns} for columns in (128, 64, 32, 16)]
    counts = [{"parts": count} for count in parts.COUNTS]
    assert split == [{**one, **count} for one in whole[1:] for count in counts]


ACCESSES = {
    "rows": (ROWS, "line"),
    "columns": (Dense(0, 0, 1, 4096), "depth"),
    "an odd pitch": (Dense(0, 0, 4097, 1), "gather"),
    "an odd address": (ROWS._replace(alignment=2), "gather"),
    "every second": (Dense(0, 0, 8192, 2), "gather"),
}


@pytest.mark.parametrize("case", ACCESSES)
def test_wide_copies_are_chosen_only_where_every_one_is_aligned(case):
    dense, wanted = ACCESSES[case]
    assert words(problem(dense=dense))[5] == f"depth/{wanted}"
    assert words(problem(dense=dense, transposed=True))[6] == f"line/{wanted}"


def test_copies_of_part_of_a_chunk_are_gathered():
    assert words(problem(columns=4090))[5] == "depth/gather"
    assert words(problem(batch=2, dense=ROWS._replace(batch=4)))[5] == "depth/gather"
    assert words(problem(dense=ROWS._replace(batch=4)))[5] == "depth/line"
    assert words(problem(values=VALUES._replace(row=66)))[5] == "gather/line"


def test_what_no_grid_holds_is_refused():
    whole = Blocks(128, 128, 1 << 20, 1, 1, 1)
    with pytest.raises(UnsupportedError, match="call it on slices"):
        choose.lower((), problem(blocks=whole, columns=2**31 - 1), ARCH, PROCESSORS)


def test_offsets_are_of_64_bits():
    """Sizes and strides that 32 bits do not hold are launch arguments as they are."""
    far = Dense(2**40, 2**39, 2**33, 1)
    step = only(choose.lower((), problem(batch=2**20, out=far, dense=far), ARCH, 132))
    assert step.grid == (32 * 32, 65535)
    assert len(step.fixed) == Fields(portable.FIXED).size


COMPILED = {
    f"{dtype} {precision} {lines}x{depth}{' transposed' * turned} {tile.lines}x{tile.columns}": (
        Variant(dtype, precision, lines, depth, turned, tile, values, dense, turned)
    )
    for dtype, precision in (("float16", "fp32"), ("float32", "fp32"), ("float32", "tf32"))
    for lines, depth in ((16, 16), (32, 32), (64, 64), (128, 128), (16, 128))
    for turned, values in ((False, "depth"), (True, "line"))
    for dense in ("line",)
    for tile in portable.tiles(dtype, precision)
}


@pytest.mark.parametrize("case", slow_but(("float16 fp32 16x16 128x128",), COMPILED))
def test_kernels_compile_without_spills(case):
    made = compiled(portable.PORTABLE.spec((), COMPILED[case], "sm_90a"), "sm_90a")
    assert made.spilled == 0 and not made.serialized
    tile = COMPILED[case].tile
    blocks = targets.resident_blocks("sm_90a", 32 * tile.warps, made.registers, made.shared)
    assert blocks >= tile.blocks


@pytest.mark.slow
@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
def test_every_target_compiles(arch):
    epilogue = (kl.Bias(), kl.Gelu(), Add())
    for tile in portable.TILES:
        given = Variant("float16", "fp32", 32, 16, False, tile, "depth", "gather", False)
        made = compiled(portable.PORTABLE.spec(epilogue, given, arch), arch)
        assert made.spilled == 0 and made.shared <= targets.SHARED_BYTES[arch]
    assert product_source.summands(epilogue) == ("y",)
