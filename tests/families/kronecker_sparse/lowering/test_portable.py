"""Lowering of Kronecker-sparse calls to the portable kernels: which of them, which grids, which
bytes of parameters. On sm_80, where there are no others."""

import re

import pytest

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.kernels.factor import portable
from kernlib.families.kronecker_sparse.kernels.factor.portable import Portable
from kernlib.families.kronecker_sparse.kernels.steps import deinterleave, portable_pack, split_k_sum
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.choose import lower
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout
from kernlib.jit import sources, targets
from kernlib.lowering.kernel import Gpu
from tests.families.kronecker_sparse.lowering.cases import (
    ADDRESSES,
    DTYPES,
    batch_last,
    parameters,
    problem,
    weight_gradient,
)
from tests.support.kernels import stem

ARCH, PROCESSORS = "sm_80", 108


def main_of(lowered):
    return next(step for step in lowered.steps if stem(step.spec) == "kronecker_sparse_portable")


def lowered(given=None, epilogue=(), arch=ARCH, choice=None, **changes):
    given = problem(**changes) if given is None else given
    return lower(epilogue, given, arch, PROCESSORS, choice)


def constant(found, name):
    return re.search(rf"constexpr \w+ {name} = (\w+);", main_of(found).spec.source)[1]


def tile(found):
    return int(constant(found, "TILE_ROWS")), int(constant(found, "TILE_COLUMNS"))


def accesses(found):
    source = main_of(found).spec.source
    return "/".join(re.findall(r"ACCESS_\w+ = Access::(\w+);", source))


ACCESSES = [  # dtype, layout of an operand (2 blocks, 3 lanes, 504 lines, depth 64), its access
    ("float16", Layout(8, 8, 64, 1), "depth"),
    ("float16", Layout(8, 8, 1, 64), "line"),
    ("float16", Layout(8, 8, 68, 1), "gather"),
    ("float16", Layout(8, 8, 0, 1), "depth"),  # one line, expanded
    ("float16", Layout(8, 8, 1, 500), "gather"),
    ("float16", Layout(8, 8, 1, 504), "line"),
    ("float16", Layout(4, 8, 64, 1), "gather"),
    ("float16", Layout(8, 1, 64, 1), "gather"),
    ("float16", Layout(8, 8, 128, 2), "gather"),
    ("float16", Layout(8, 8, 64, 1, alignment=0), "depth"),  # of the address modulo 16
    ("float16", Layout(8, 8, 64, 1, alignment=8), "gather"),
    ("bfloat16", Layout(8, 8, 64, 1), "depth"),
    ("float32", Layout(4, 4, 68, 1), "depth"),
    ("float32", Layout(4, 4, 66, 1), "gather"),
    ("float32", Layout(4, 4, 1, 500), "line"),
    ("float32", Layout(4, 4, 64, 1, alignment=4), "gather"),
]


@pytest.mark.parametrize(("dtype", "layout", "expected"), ACCESSES)
def test_wide_copies_are_chosen_only_where_every_one_is_aligned(dtype, layout, expected):
    given = problem(blocks=2, lanes=3, rows=504, depth=64, columns=504, left=layout, dtype=dtype)
    assert accesses(lowered(given)).split("/")[0] == expected
    assert accesses(lowered(given._replace(right=layout))).split("/")[1] == expected


def test_strides_of_what_there_is_one_of_do_not_count():
    odd = problem(blocks=1, lanes=1, left=Layout(7, 9, 48, 1), right=Layout(3, 1, 48, 1))
    assert accesses(lowered(odd)) == "depth/depth"
    row = problem(blocks=1, rows=1, left=Layout(0, 0, 7, 1), out=OutLayout(0, 0, 5, 1))
    assert accesses(lowered(row)) == "depth/depth" and fixed(lowered(row))["out_vectors"] == 1
    shallow = problem(blocks=1, depth=1, left=Layout(0, 0, 8, 7), right=Layout(0, 0, 1, 7))
    assert accesses(lowered(shallow)) == "gather/line"
    assert accesses(lowered(shallow._replace(rows=1, left=Layout(0, 0, 7, 7)))) == "gather/line"


def test_lines_that_end_within_a_copy_are_gathered_unless_zeros_follow():
    """A copy of fewer than 16 bytes reads 16, of which memory may hold but the first."""
    ends = problem(blocks=1, depth=50, left=Layout(0, 0, 56, 1), right=Layout(0, 0, 56, 1))
    assert accesses(lowered(ends)) == "gather/depth"  # the weight is packed, and ends in zeros
    assert accesses(lowered(ends._replace(left=Layout(0, 0, 56, 1, 16, True)))) == "depth/depth"
    row = problem(blocks=1, rows=1, depth=50, left=Layout(0, 0, 0, 1), right=Layout(0, 0, 56, 1))
    assert accesses(lowered(row)) == "gather/gather"
    across = problem(blocks=1, rows=100, left=Layout(0, 0, 1, 104))
    assert accesses(lowered(across)).startswith("gather/")
    assert accesses(lowered(across._replace(rows=104))).startswith("line/")


TILES = [  # problem, its tile
    (problem(), (128, 128)),
    (problem(columns=64), (128, 64)),
    (problem(columns=48), (128, 64)),
    (problem(columns=192), (128, 64)),  # pads less
    (problem(columns=768), (128, 128)),
    (problem(columns=768, dtype="float32"), (128, 64)),
    (problem(columns=768, dtype="float32", precision="tf32"), (128, 128)),
    (problem(rows=64), (64, 64)),
    (problem(rows=3000), (64, 64)),  # too few for 108 multiprocessors
    (problem(rows=10, columns=1000, depth=1000), (64, 64)),
    (batch_last(columns=512, depth=512, dtype="bfloat16"), (128, 128)),
    (batch_last(rows=25089), (128, 128)),
    (problem(lanes=3, right=Layout(1, 1, 1, 1)), (128, 128)),  # packed, so that one side gathers
    (problem(lanes=3, rows=1000, blocks=100), (128, 64)),  # both sides gather
    (weight_gradient(), (128, 64)),
    (weight_gradient(b=48), (64, 64)),
    (weight_gradient(b=768, c=768), (128, 128)),
]


@pytest.mark.parametrize(("given", "expected"), TILES)
def test_the_tile_fits_the_result(given, expected):
    found = lowered(given)
    assert tile(found) == expected
    step, count = main_of(found), fixed(found)
    across = given.blocks * given.lanes * -(-given.columns // expected[1])
    assert count["columns_of_tiles"] == across
    assert step.grid == (across * count["rows_of_tiles"], 1)


# The parameter blocks.


def fixed(found):
    """The parameters of the main kernel, by name."""
    made = parameters(main_of(found))
    values = {name: getattr(made, name) for name, _ in made._fields_}
    return {name: list(v) if hasattr(v, "__len__") else v for name, v in values.items()}


def test_the_parameters_are_the_struct_of_the_source():
    given = problem(
        blocks=3, lanes=5, rows=2**33 + 7, columns=1000, depth=77,
        left=Layout(11, 12, 2**40, 14), right=Layout(21, 22, 24, 23),
        out=OutLayout(31, 32, 33, 2**34), dtype="float32",
    )  # fmt: skip
    found = lowered(given, choice={"kind": "portable", "rows": 128, "columns": 64})
    pack, main = found.steps
    assert stem(pack.spec) == "kronecker_sparse_portable_pack"
    pitch = 80  # 77 up to whole chunks
    count = fixed(found)
    assert count["left_strides"] == [11, 12, 2**40, 14]
    assert count["right_strides"] == [5 * 1000 * pitch, 1000 * pitch, pitch, 1]
    strides = [count[f"out_{name}_stride"] for name in ("block", "lane", "row", "column", "split")]
    assert strides == [31, 32, 33, 2**34, 0]
    assert [count[name] for name in ("rows", "columns", "depth")] == [2**33 + 7, 1000, 77]
    assert count["split_depth"] == pitch
    row_tiles = 2**26 + 1
    assert [count[n] for n in ("lanes", "column_tiles", "row_tiles")] == [5, 16, row_tiles]
    assert count["columns_of_tiles"] == 16 * 15 and count["rows_of_tiles"] == row_tiles
    slab = count["rows_a_slab"]
    assert slab == (2**31 - 1) // 240 and main.grid == (slab * 240, 8) and 8 * slab >= row_tiles
    assert (count["left_depth_first"], count["right_depth_first"]) == (1, 1)
    assert (count["out_along_rows"], count["out_vectors"]) == (1, 0)
    assert found.workspace == 3 * 5 * 1000 * pitch * 4

    read = parameters(pack)
    assert (read.right, read.packed) == (ADDRESSES["right"], ADDRESSES["workspace"])
    assert list(read.strides) == [21, 22, 24, 23]
    assert (read.depth, read.lanes, read.lines, read.chunks) == (77, 5, 1000, 20)
    assert (read.total, read.lines_first) == (3 * 5 * 1000 * 20, 0)
    assert pack.grid == (-(-read.total // 256), 1)


def test_pointers_and_scalars_are_in_the_order_of_the_source():
    found = lowered(epilogue=(kl.Bias(), kl.Scale(), kl.Bias("late"), kl.Scale("gain")))
    (step,) = found.steps
    names = ("left", "right", "out", "vector0", "vector1")
    assert step.pointers == tuple((name, 0) for name in names) and step.scalars == 2
    assert constant(found, "VECTORS") == constant(found, "SCALARS") == "2"
    read = parameters(step)
    fields = ("left", "right", "out", "vector0", "vector1")
    assert [getattr(read, field) for field in fields] == [ADDRESSES[name] for name in names]
    assert [(getattr(read, f"value{k}"), getattr(read, f"device{k}")) for k in (0, 1)] == [
        (0.5, 900), (1.5, 901),
    ]  # fmt: skip


STORES = [  # dtype, out (2 blocks, 3 lanes, 500 rows, 96 columns), along rows, whole vectors
    ("float16", OutLayout(8, 8, 96, 1), 0, 1),
    ("float16", OutLayout(8, 8, 1, 504), 1, 1),
    ("float16", OutLayout(8, 8, 1, 500), 1, 0),
    ("float32", OutLayout(4, 4, 1, 500), 1, 1),
    ("float32", OutLayout(4, 4, 1, 500, alignment=8), 1, 0),
    ("float16", OutLayout(8, 1, 96, 3), 0, 0),
    ("float16", OutLayout(4, 8, 96, 1), 0, 0),
    ("float16", OutLayout(8, 8, 96, 1, alignment=0), 0, 1),
    ("float16", OutLayout(8, 8, 3, 1500), 1, 0),
]


@pytest.mark.parametrize(("dtype", "out", "along_rows", "vectors"), STORES)
def test_wide_stores_are_chosen_only_where_every_one_is_aligned(dtype, out, along_rows, vectors):
    found = lowered(blocks=2, lanes=3, rows=500, out=out, dtype=dtype)
    assert fixed(found)["out_along_rows"] == along_rows
    assert fixed(found)["out_vectors"] == vectors
    assert not re.search(
        "vectors|along", main_of(found).spec.source.split("portable/portable.cuh")[1]
    )


# Packed weights and split depths.


def test_weights_are_packed_where_many_tiles_read_what_they_would_gather():
    lanes = problem(lanes=4)
    found = lowered(lanes)
    assert [stem(step.spec) for step in found.steps] == [
        "kronecker_sparse_portable_pack",
        "kronecker_sparse_portable",
    ]
    assert accesses(found) == "gather/depth"
    assert [step.pointers[-1] for step in found.steps] == [("workspace", 0), ("out", 0)]
    assert main_of(found).pointers[1] == ("workspace", 0)
    assert found.workspace == 2 * 4 * 96 * 48 * 2
    assert len(lowered(lanes._replace(rows=1000)).steps) == 1
    assert len(lowered(lanes=1).steps) == 1
    transposed = problem(right=Layout(96 * 48, 1, 1, 96))
    assert len(lowered(transposed).steps) == 1 and accesses(lowered(transposed)) == "depth/line"
    assert len(lowered(weight_gradient(b=1024, d=4, batch=1025)).steps) == 2  # splits, no packing


def test_packed_lines_are_whole_chunks():
    found = lowered(depth=50, left=Layout(50, 1, 100, 1))
    assert accesses(found) == "gather/depth" and found.workspace == 2 * 96 * 56 * 2
    assert fixed(found)["depth"] == 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 1023, 1024, 25088, 25089, 10**6])
@pytest.mark.parametrize("pattern", [(1, 8, 8, 1), (2, 96, 48, 3), (4, 192, 48, 16)])
def test_splits_cover_the_depth_and_leave_none_empty(pattern, batch, dtype):
    given = weight_gradient(*pattern, batch=batch, dtype=dtype)
    found = Portable().launch_untuned((), given, Gpu(ARCH, PROCESSORS))
    count = fixed(found)
    splits = count["rows_of_tiles"] // count["row_tiles"]
    assert (splits - 1) * count["split_depth"] < batch <= splits * count["split_depth"]
    assert count["split_depth"] % (64 // (4 if dtype == "float32" else 2)) == 0
    assert splits == 1 or batch // splits >= portable.MIN_SPLIT // 2
    if splits == 1:
        assert len(found.steps) == 1 and not found.workspace
        return
    pitch = -(-given.columns // 4) * 4
    one = given.blocks * given.lanes * given.rows * pitch
    assert found.workspace == 4 * one * splits and count["out_split_stride"] == one
    main, reduce = found.steps
    assert main.pointers[-1] == ("workspace", 0)
    assert "using OutputT = float;" in main.spec.source and not main.scalars
    read = parameters(reduce)
    assert (read.partial, read.out) == (ADDRESSES["workspace"], ADDRESSES["out"])
    assert (read.splits, read.split_stride) == (splits, one)
    assert (read.lanes, read.rows, read.columns) == given[1:4]
    assert (read.runs, read.total) == (pitch // 4, one // 4)
    assert [getattr(read, f"out_{n}_stride") for n in ("block", "lane", "row", "column")] == list(
        given.out[:4]
    )


def test_splits_fill_the_device_and_stop_there():
    for pattern in ((6, 64, 64, 1), (1, 768, 192, 2), (1, 512, 512, 4)):
        found = lower((), weight_gradient(*pattern), ARCH, 132)
        blocks = main_of(found).grid[0]
        assert 0.9 * 264 <= blocks <= 264
    many = weight_gradient(64, 128, 128, 16)
    assert main_of(lower((), many, ARCH, 132)).grid[0] <= 4 * 1024


def test_an_epilogue_is_never_split():
    assert len(lowered(weight_gradient(), (kl.Bias(),)).steps) == 1


def test_sizes_up_to_the_grids_limit_are_taken_and_larger_ones_refused():
    assert lowered(rows=2**31 * 64).steps[0].grid[1] > 1
    with pytest.raises(UnsupportedError, match="slices"):
        lowered(blocks=2**31, rows=9)
    with pytest.raises(UnsupportedError, match=f"over {2**31} terms .*slices"):
        lowered(weight_gradient(batch=2**31))


# Choices.


def test_the_candidates_are_the_tiles_that_a_problem_fills():
    made = lowering.candidates(problem(), ARCH)
    assert made == [
        {"kind": "portable", "rows": rows, "columns": columns}
        for rows, columns in ((128, 128), (128, 64), (64, 64))
    ]
    assert len(lowering.candidates(problem(rows=64), ARCH)) == 1
    assert len(lowering.candidates(problem(dtype="float32"), ARCH)) == 2
    for choice in made:
        for named in (choice, {name: str(value) for name, value in choice.items()}):
            assert tile(lowered(choice=named)) == (choice["rows"], choice["columns"])


@pytest.mark.parametrize("choice", [
    None, {}, {"kind": "portable"}, {"kind": "later", "rows": 128, "columns": 64},
    {"kind": "portable", "rows": 32, "columns": 64}, {"rows": 64, "columns": 64},
])  # fmt: skip
def test_a_choice_that_is_no_candidate_is_passed_over(choice):
    assert lowered(choice=choice) == lowered()


# The generated source.


def test_constants_agree_with_the_source():
    folder = sources.root() / "kronecker_sparse"
    read = {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*.cuh")}
    for file, name, value in (
        ("portable/operand.cuh", "THREADS", portable.THREADS),
        ("portable/operand.cuh", "LINE_BYTES", portable.LINE_BYTES),
        ("portable/pack.cuh", "THREADS", portable_pack.THREADS),
        ("split_k_sum.cuh", "THREADS", split_k_sum.THREADS),
        ("split_k_sum.cuh", "RUN", split_k_sum.RUN),
        ("portable/config.cuh", "PART", portable.PART),
        ("deinterleave.cuh", "THREADS", deinterleave.THREADS),
        ("deinterleave.cuh", "CHUNK", deinterleave.CHUNK),
    ):
        assert re.search(rf"constexpr int {name} = (\d+);", read[file])[1] == str(value)
    kinds = re.search(r"enum class Access \{ (.*) \};", read["portable/access.cuh"])[1]
    assert tuple(kinds.split(", ")) == portable.ACCESSES


def test_a_target_without_the_shared_memory_is_an_error(monkeypatch):
    monkeypatch.setitem(targets.SHARED_BYTES, ARCH, 40_000)
    assert tile(lowered()) == (64, 64)
    monkeypatch.setitem(targets.SHARED_BYTES, ARCH, 10_000)
    with pytest.raises(UnsupportedError, match="bytes of shared memory, a block of sm_80 has 9872"):
        lowered()
