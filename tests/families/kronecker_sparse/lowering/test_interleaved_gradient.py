"""Gradients of weights with 2 to 8 l, one operand of which is read as it lies: which problems are
this kernel's, what its launches are, and what NVRTC makes of its text."""

import pytest

import kernlib as kl
from kernlib.families.kronecker_sparse.kernels.gradient import interleaved_gradient as gradient
from kernlib.families.kronecker_sparse.kernels.gradient.interleaved_gradient import (
    InterleavedGradient,
)
from kernlib.families.kronecker_sparse.kernels.steps import deinterleave
from kernlib.families.kronecker_sparse.kernels.steps.deinterleave import Deinterleave
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, Scope
from kernlib.jit import targets
from kernlib.lowering.kernel import Gpu
from tests.families.kronecker_sparse.lowering.cases import (
    ADDRESSES,
    ARCH,
    PROCESSORS,
    entries,
    kinds_of,
    parameters,
    text_of,
    weight_gradient,
)
from tests.support.compiled_kernels import compiled

KERNEL, HALVES = InterleavedGradient(), ("float16", "bfloat16")
KERNELS = ["deinterleave", "interleaved_gradient", "split_k_sum"]


def lowered(problem, multiprocessors=PROCESSORS, epilogue=()):
    (choice,), gpu = KERNEL.choices(problem, ARCH), Gpu(ARCH, multiprocessors)
    return KERNEL.launch(epilogue, problem, gpu, choice)


def sums(problem):
    """Of a bias too."""
    return KERNEL.sums(problem, Gpu(ARCH, PROCESSORS), True)


# Which problems.

SIX = weight_gradient(2, 96, 48, 3)
ONE = weight_gradient(1, 96, 48, 3)
ACCEPTED = {
    **{f"d = {d}": weight_gradient(2, 96, 48, d) for d in range(2, 9)},
    **{f"d = {d}, more features of x": weight_gradient(2, 48, 96, d) for d in range(2, 9)},
    "bfloat16": weight_gradient(2, 96, 48, 3, dtype="bfloat16"),
    "an odd batch": weight_gradient(2, 96, 48, 3, batch=25089),
    "just deep": weight_gradient(2, 96, 48, 3, batch=1025),
    "four times the features": weight_gradient(1, 512, 384, 2, batch=2048),
    "32 rows": weight_gradient(1, 32, 5, 2),
    "32 columns": weight_gradient(1, 5, 32, 2),
    "one column": weight_gradient(2, 32, 1, 4),
    "rows apart": SIX._replace(left=SIX.left._replace(depth=576 + 8)),
    "rows of the other operand anywhere": SIX._replace(right=SIX.right._replace(depth=288 + 3)),
    "a misaligned other operand": SIX._replace(right=SIX.right._replace(alignment=2)),
    "an address that is 0 modulo 16": SIX._replace(left=SIX.left._replace(alignment=0)),
    "one block of any stride": ONE._replace(left=ONE.left._replace(block=7)),
    "a result of any strides": SIX._replace(out=OutLayout(7, 11, 13, 17, 2)),
}
REFUSED = {  # by name: a problem, an arch, the kind that it goes to
    "float32": (weight_gradient(2, 96, 48, 3, dtype="float32"), ARCH, "turned"),
    "d = 1": (weight_gradient(2, 96, 48, 1), ARCH, "gradient"),
    "d = 9": (weight_gradient(2, 96, 48, 9), ARCH, "turned"),
    "d = 16": (weight_gradient(2, 96, 48, 16), ARCH, "turned"),
    "31 rows and columns": (weight_gradient(1, 31, 31, 8), ARCH, "turned"),
    "a misaligned operand": (SIX._replace(left=SIX.left._replace(alignment=8)), ARCH, "turned"),
    "a misaligned x of more features": (
        weight_gradient(2, 48, 96, 3, right=Layout(288, 1, 3, 576, 8)), ARCH, "turned",
    ),
    "rows of 66 features": (weight_gradient(1, 33, 32, 2), ARCH, "turned"),
    "blocks of 66 features": (weight_gradient(4, 33, 32, 2), ARCH, "turned"),
    "rows that end in a chunk": (
        SIX._replace(left=SIX.left._replace(depth=576 + 4)), ARCH, "turned",
    ),
    "an expanded gradient": (SIX._replace(left=SIX.left._replace(depth=0)), ARCH, "turned"),
    "features apart": (SIX._replace(left=Layout(600, 2, 6, 9000)), ARCH, "portable"),
    "blocks apart": (SIX._replace(right=Layout(150, 1, 3, 300)), ARCH, "portable"),
    "1024 terms": (weight_gradient(2, 96, 48, 3, batch=1024), ARCH, "portable"),
    "fewer terms than four times the features": (
        weight_gradient(1, 512, 512, 2, batch=2047), ARCH, "portable",
    ),
    "three tiles of columns": (weight_gradient(1, 512, 512, 2), ARCH, "turned"),
    "batch last": (weight_gradient(2, 96, 48, 3, last=True), ARCH, "gradient"),
    "2**31 features": (weight_gradient(2**20, 256, 8, 8, batch=1025), ARCH, "portable"),
    "an older GPU": (SIX, "sm_80", "turned"),
    "a newer GPU": (SIX, "sm_100", "turned"),
}  # fmt: skip


@pytest.mark.few(len(ACCEPTED))
@pytest.mark.parametrize("name", ACCEPTED)
def test_deep_sums_of_interleaved_features_are_for_this_kernel(name):
    problem = ACCEPTED[name]
    assert kinds_of(problem)[:2] == ["interleaved_gradient", "turned"]
    assert entries(lowering.lower((), problem, ARCH, PROCESSORS)) == KERNELS


@pytest.mark.few(len(REFUSED))
@pytest.mark.parametrize("name", REFUSED)
def test_others_are_for_other_kinds(name):
    problem, arch, kind = REFUSED[name]
    assert not KERNEL.takes(problem, arch)
    assert kinds_of(problem, arch)[0] == kind


def test_an_epilogue_needs_all_of_a_sum():
    call = lowered(SIX, epilogue=(kl.Bias(), kl.Gelu()))
    assert entries(call)[-1] == "portable" and "Gelu" in call.steps[-1].spec.description


WIDTHS = [  # columns, l, those of the tile
    (1, 2, 8), (48, 2, 48), (192, 2, 192), (193, 2, 104), (400, 2, 136), (768, 2, 192),
    (128, 3, 128), (130, 3, 72), (88, 4, 88), (192, 4, 64), (72, 5, 72), (60, 6, 32),
    (64, 7, 32), (40, 8, 40), (41, 8, 24), (768, 8, 40),
]  # fmt: skip


@pytest.mark.few(len(WIDTHS))
@pytest.mark.parametrize(("count", "lanes", "columns"), WIDTHS)
def test_one_tile_holds_all_columns_or_few_are_padded(count, lanes, columns):
    assert gradient.columns_of(count, lanes) == columns
    for sizes in ((768, count), (count, 768)):
        given = weight_gradient(1, *sizes, lanes)
        assert KERNEL.takes(given, ARCH) == (count <= 2 * columns)
        assert KERNEL.choices(given, ARCH) == [{"columns": columns}]


@pytest.mark.few(7)
@pytest.mark.parametrize("lanes", gradient.LANES)
def test_tiles_have_registers_and_stages(lanes):
    widths = {gradient.columns_of(count, lanes) for count in range(1, 1000)}
    assert widths == set(range(8, max(widths) + 8, 8))
    for columns in widths:
        for bias in {False, lanes in gradient.BIAS_LANES}:
            spec = KERNEL.spec((), KERNEL.Variant("float16", lanes, columns, bias), ARCH)
            text = text_of(spec.source)
            assert lanes * (text["SUMS"] + gradient.FRAGMENT) <= gradient.MOST_REGISTERS
            assert text["HELD"] == 1 or lanes * (text["SUMS"] + 8) <= 192
            assert text["STAGES"] >= 2 and text["STAGE_BYTES"] % 1024 == 0
            assert spec.shared_bytes == 1024 + text["STAGES"] * text["STAGE_BYTES"]
            barriers = 8 * 2 * text["STAGES"]
            assert spec.shared_bytes + barriers <= targets.SHARED_BYTES[ARCH]
            assert spec.threads == text["THREADS"] == 384
            for name in ("TILE_ROWS", "TILE_DEPTH", "ROW"):
                assert text[name] == getattr(gradient, name)
            assert text["LEFT_BOXES"] * text["ROW"] == text["TILE_ROWS"] * lanes


# Launches.

SUMMED = {
    "d = 3": SIX,
    "more features of x": weight_gradient(1, 48, 768, 2),
    "tiles of rows and columns": weight_gradient(2, 768, 400, 2),
    "more tiles than multiprocessors": weight_gradient(4, 512, 512, 8, batch=3000),
    "one tile": weight_gradient(1, 32, 8, 2, batch=10**6),
    "a last stage of one": weight_gradient(1, 128, 63, 4, batch=32 * 1000 + 1),
    "bfloat16": weight_gradient(3, 200, 72, 5, dtype="bfloat16"),
}


def features_of(problem, count):
    return problem.blocks * count * problem.lanes


@pytest.mark.parametrize("multiprocessors", [1, 16, 78, 132])
@pytest.mark.parametrize("name", SUMMED)
def test_tiles_cover_the_result_and_the_batch_once(name, multiprocessors):
    problem, _ = gradient.oriented(SUMMED[name])
    _, main, reduce = lowered(SUMMED[name], multiprocessors).steps
    text, p, splits = text_of(main.spec.source), parameters(main), parameters(reduce).splits
    assert (p.blocks, p.rows, p.depth) == (problem.blocks, problem.rows, problem.depth)
    terms = {}
    for index in range(p.tiles):
        tile = text.run(text.body("Tile(const Parameters& p"), p=p, index=index)
        parts = terms.setdefault((tile.block, tile.row, tile.column), {})
        assert tile.split not in parts and 0 <= tile.split < splits
        parts[tile.split] = tile.first, tile.depth
    sizes = (problem.blocks, p.row_tiles, p.column_tiles)
    assert len(terms) == sizes[0] * sizes[1] * sizes[2] and p.tiles == len(terms) * splits
    assert all(0 <= n < size for place in terms for n, size in zip(place, sizes, strict=True))
    stages = -(-problem.depth // text["TILE_DEPTH"])
    for parts in terms.values():
        covered = [k for first, depth in parts.values() for k in range(first, first + depth)]
        assert sorted(covered) == list(range(stages))
        assert all(depth > 0 for _, depth in parts.values())
    assert (p.row_tiles - 1) * text["TILE_ROWS"] < problem.rows <= p.row_tiles * text["TILE_ROWS"]
    columns = text["TILE_COLUMNS"]
    assert (p.column_tiles - 1) * columns < problem.columns <= p.column_tiles * columns
    assert main.grid == (min(multiprocessors, p.tiles), 1)


@pytest.mark.parametrize("name", SUMMED)
def test_each_launch_reads_what_the_one_before_wrote(name):
    asked, (problem, names) = SUMMED[name], gradient.oriented(SUMMED[name])
    assert names == (("right", "left") if asked.rows < asked.columns else ("left", "right"))
    call = lowered(asked)
    apart, main, reduce = call.steps
    p, sums = parameters(main), parameters(reduce)
    place = p.partial - ADDRESSES["workspace"]
    assert apart.pointers == ((names[1], 0), ("workspace", 0))
    assert main.pointers == ((names[0], 0), ("workspace", 0), ("workspace", place))
    assert reduce.pointers == (("workspace", place), ("out", 0))
    line = -(-problem.columns // 8) * 8
    assert deinterleave.size(problem) == 2 * problem.depth * features_of(problem, line)
    assert deinterleave.size(problem) <= place and place % 256 == 0
    assert p.pitch == sums.runs * 4 and 0 <= p.pitch - problem.columns < 4
    assert sums.split_stride == features_of(problem, problem.rows) * p.pitch == sums.total * 4
    assert call.workspace == place + 4 * sums.splits * sums.split_stride
    strides = [getattr(sums, f"out_{n}_stride") for n in ("block", "lane", "row", "column")]
    block, lane, row, column, _ = asked.out
    assert strides == [block, lane, *((column, row) if names[0] == "right" else (row, column))]
    assert (sums.rows, sums.columns) == (problem.rows, problem.columns)


VECTORS = [  # columns, stride of rows, alignment, whether all 16 bytes are aligned and of one block
    (48, 288, 16, 1), (48, 288, 0, 1), (48, 296, 16, 1), (48, 288, 2, 0), (48, 288, 8, 0),
    (48, 291, 16, 0), (47, 288, 16, 0),
]  # fmt: skip


@pytest.mark.few(len(VECTORS))
@pytest.mark.parametrize(("columns", "stride", "alignment", "vectors"), VECTORS)
def test_wide_loads_are_chosen_only_where_every_one_is_aligned(columns, stride, alignment, vectors):
    problem = weight_gradient(1, 96, columns, 3)
    right = problem.right._replace(block=0, depth=stride, alignment=alignment)
    read = parameters(lowered(problem._replace(right=right)).steps[0])
    assert (read.vectors, read.row_stride, read.columns) == (vectors, stride, columns)
    assert (read.chunks, read.total) == (6, 25088 * 6)


def test_sums_begin_before_the_launch_before_ends_and_wait_where_they_read():
    apart, main, reduce = lowered(SIX).steps
    assert (apart.overlaps, main.overlaps, reduce.overlaps) == (False, True, False)
    producer = text_of(main.spec.source).body(" produce(")
    assert producer.index("wait_for_prerequisites();") < producer.index("load_stage(")
    assert "launch_dependents();" in text_of(apart.spec.source).body("kronecker_sparse_deinterl")


@pytest.mark.parametrize("name", SUMMED)
def test_tensor_maps_are_the_operands(name):
    problem, _ = gradient.oriented(SUMMED[name])
    left, right = lowered(SUMMED[name]).steps[1].maps
    a, d, line = problem.blocks, problem.lanes, -(-problem.columns // 8) * 8
    block = problem.rows * d
    assert left.sizes == (block, a, problem.depth, 1)
    assert right.sizes == (problem.columns, d, problem.depth, a)
    assert left.strides == (2 * block if a > 1 else 16, 2 * a * block, 16)
    assert right.strides == (2 * line, 2 * a * d * line, 2 * d * line if a > 1 else 16)
    for each in (left, right):
        assert (each.dtype, each.box, each.swizzle) == (problem.dtype, (64, 1, 32, 1), 128)
        assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in each.strides)


@pytest.mark.few(0)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", [(96, 48), (48, 96), (768, 400), (33, 32), (200, 200)])
@pytest.mark.parametrize("lanes", gradient.LANES)
def test_launches_are_of_the_variants(lanes, sizes, dtype):
    check_variants(lanes, sizes, dtype)


def test_launches_of_some_factors_are_of_the_variants():
    for lanes in (2, 4, 5, 8):
        check_variants(lanes, (200, 96), "bfloat16")


def check_variants(lanes, sizes, dtype):
    problem = weight_gradient(2, *sizes, lanes, dtype=dtype)
    all_of_them = set(lowering.variants((), (2, *sizes, lanes), ARCH, (dtype,), None))
    for each in (problem, problem._replace(blocks=4, depth=9001)):
        if KERNEL.takes(each, ARCH):
            assert {step.spec for step in lowered(each).steps} <= all_of_them
        for bias in {False, lanes in gradient.BIAS_LANES}:
            call = KERNEL.sums(each, Gpu(ARCH, PROCESSORS), bias)
            assert {step.spec for step in call.steps} <= all_of_them
    for other in ((*sizes, 1), (*sizes, 9)):
        assert KERNEL.specs((), Scope(other, ((dtype, "fp32"),), ARCH), ARCH) == []
    for arch, other in (("sm_80", dtype), (ARCH, "float32")):
        assert KERNEL.specs((), Scope((*sizes, lanes), ((other, "fp32"),), arch), arch) == []


def test_a_bias_has_a_run_behind_each_row():
    problem = weight_gradient(2, 96, 45, 3)
    main, reduce = sums(problem).steps
    p, read = parameters(main.placed({"h": ("right", 0)})), parameters(reduce)
    assert p.pitch == 48 + 4 == 4 * read.runs and read.bias == ADDRESSES["bias"]
    assert text_of(main.spec.source)["BIAS"] and text_of(reduce.spec.source)["BIAS"]
    assert main.pointers == (("left", 0), ("h", 0), ("workspace", 0))


# What NVRTC makes of it.


def check_compiled(lanes, columns, dtype, bias=False):
    kernel = compiled(KERNEL.spec((), KERNEL.Variant(dtype, lanes, columns, bias), ARCH), ARCH)
    assert kernel.registers == 168  # at launch: what the producer hands on must be there
    assert not kernel.serialized and kernel.spilled <= 64, (lanes, columns, kernel.log)


def test_a_kernel_keeps_its_sums_in_registers():
    check_compiled(2, 96, "float16", True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("lanes", gradient.LANES)
def test_every_kernel_keeps_its_sums_in_registers(lanes, dtype):
    most = max(gradient.columns_of(count, lanes) for count in range(1, 400))
    for columns in (8, most // 2 // 8 * 8, most - 8, most):
        for bias in {False, lanes in gradient.BIAS_LANES}:
            check_compiled(lanes, columns, dtype, bias)
    assert compiled(Deinterleave().spec((), Deinterleave.Variant(dtype, lanes)), ARCH).spilled == 0
