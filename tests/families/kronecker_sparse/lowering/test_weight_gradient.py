"""Lowering of gradients of weights: sums over parts of a long depth on Hopper, and operands turned
for them on every target."""

import pytest

import kernlib as kl
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.kernels.gradient import weight_gradient as gradient
from kernlib.families.kronecker_sparse.kernels.gradient.turned import Turned, transposed_problem
from kernlib.families.kronecker_sparse.kernels.gradient.weight_gradient import WeightGradient
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.choose import lower
from kernlib.families.kronecker_sparse.lowering.problem import Layout, Scope
from kernlib.jit import targets
from tests.families.kronecker_sparse.lowering.cases import (
    ADDRESSES,
    ARCH,
    DTYPES,
    ITEMSIZE,
    PROCESSORS,
    entries,
    kind_of,
    kinds_of,
    parameters,
    problem,
    text_of,
    weight_gradient,
)

EPILOGUE = (kl.Bias(), kl.Gelu())
NUMBERS = (("float16", "fp32"),)


def last(*pattern, **changes):
    return weight_gradient(*pattern, last=True, **changes)


TAKEN = {  # by name: a problem, its kind, the kernels of its launches
    "batch first": (weight_gradient(), "gradient", ["hopper", "split_k_sum"]),
    "batch last": (last(), "gradient", ["hopper", "split_k_sum"]),
    "batch last, d > 1": (last(2, 96, 48, 3), "gradient", ["hopper", "split_k_sum"]),
    "batch first, d = 3": (
        weight_gradient(2, 96, 48, 3), "interleaved_gradient",
        ["deinterleave", "interleaved_gradient", "split_k_sum"],
    ),
    "batch first, d = 9": (
        weight_gradient(2, 96, 48, 9), "turned",
        ["transpose", "transpose", "hopper", "split_k_sum"],
    ),
    "float32": (weight_gradient(dtype="float32"), "portable", ["portable", "split_k_sum"]),
    "float32, d > 1": (
        weight_gradient(2, 96, 48, 3, dtype="float32"), "turned",
        ["transpose", "transpose", "portable", "split_k_sum"],
    ),
    "an odd batch, last": (last(batch=25089), "portable", ["portable", "split_k_sum"]),
    "an odd batch, turned": (
        weight_gradient(2, 96, 48, 16, batch=25089), "turned",
        ["transpose", "transpose", "hopper", "split_k_sum"],
    ),
    "rows of 97": (weight_gradient(1, 97, 48), "portable", ["portable", "split_k_sum"]),
    "a deep product": (problem(rows=64, depth=4096), "gradient", ["hopper", "split_k_sum"]),
    "a misaligned operand": (
        last()._replace(left=last().left._replace(alignment=8)), "portable",
        ["portable", "split_k_sum"],
    ),
    "features apart": (
        weight_gradient(2, 96, 48, 3)._replace(left=Layout(600, 2, 6, 9000)), "portable",
        ["portable", "split_k_sum"],
    ),
    "an expanded gradient": (
        last()._replace(left=Layout(0, 0, 0, 0)), "portable", ["portable", "split_k_sum"]
    ),
}  # fmt: skip
SHALLOW = [
    weight_gradient(batch=1024), last(batch=1024), weight_gradient(2, 96, 48, 3, batch=1000),
    weight_gradient(1, 2048, 2048, batch=8000),
]  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_deep_sums_with_one_side_contiguous_go_to_hopper(name):
    given, kind, kernels = TAKEN[name]
    assert kind_of(given) == kind
    assert entries(lower((), given, ARCH, PROCESSORS)) == kernels


@pytest.mark.parametrize("given", SHALLOW)
def test_shallow_sums_are_products_like_others(given):
    assert kind_of(given) not in ("interleaved_gradient", "gradient", "turned")


@pytest.mark.parametrize("arch", [arch for arch in targets.SHARED_BYTES if arch != ARCH])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_targets_turn_operands_for_the_portable_kernel(arch, dtype):
    turned = weight_gradient(2, 96, 48, 3, dtype=dtype)
    assert set(kinds_of(turned, arch)) == {"turned", "portable"}
    assert entries(lower((), turned, arch, 80))[:3] == ["transpose", "transpose", "portable"]
    for given in (weight_gradient(dtype=dtype), last(2, 96, 48, 3, dtype=dtype)):
        assert kinds_of(given, arch) == ["portable"]


WIDTHS = [  # columns, batch first, those of the tile
    (1, False, 16), (48, False, 48), (100, False, 128), (129, False, 192), (256, False, 256),
    (257, False, 192), (512, False, 256), (640, False, 128), (8, True, 64), (96, True, 128),
    (256, True, 256), (384, True, 192),
]  # fmt: skip


@pytest.mark.parametrize(("count", "first", "columns"), WIDTHS)
def test_one_tile_holds_all_columns_or_few_are_padded(count, first, columns):
    given = weight_gradient(1, 96, count) if first else last(1, 96, count)
    if kind_of(given) == "gradient":
        (choice,) = WeightGradient().choices(given, ARCH)
        assert choice == {"columns": columns}
    assert gradient.columns_of(count, first) == columns


# Parts of the depth.

SUMMED = {
    "batch first": weight_gradient(),
    "batch last": last(2, 96, 48, 3, batch=25088),
    "one tile": last(1, 8, 8, batch=10**6),
    "more tiles than multiprocessors": last(4, 256, 512, 16, batch=3000),
    "one block more than a part": last(1, 128, 64, batch=64 * 1000 + 8),
    "a last block of one": last(1, 128, 64, batch=4096 + 8),
    "bfloat16": weight_gradient(3, 200, 328, dtype="bfloat16"),
    "a deep product": problem(rows=64, depth=4096),
}


def summed(name, multiprocessors=PROCESSORS):
    found = lower((), SUMMED[name], ARCH, multiprocessors)
    assert entries(found) == ["hopper", "split_k_sum"]
    return found


@pytest.mark.parametrize("multiprocessors", [1, 16, 78, 132])
@pytest.mark.parametrize("name", SUMMED)
def test_tiles_cover_the_result_and_the_depth_once(name, multiprocessors):
    given, found = SUMMED[name], summed(name, multiprocessors)
    main, reduce = found.steps
    text, p, sums = text_of(main.spec.source), parameters(main), parameters(reduce)
    for field in ("blocks", "lanes", "rows", "columns", "depth"):
        assert getattr(p, field) == getattr(given, field)
    made, terms = [], {}
    for index in range(p.tiles):
        tile = text.run(text.body("Tile(const Parameters& p"), p=p, index=index)
        made.append((tile.split, tile.block, tile.lane, tile.row, tile.column))
        terms.setdefault(made[-1][1:], []).append((tile.first, tile.depth))
    sizes = (sums.splits, given.blocks, given.lanes, p.row_tiles, p.column_tiles)
    assert len(set(made)) == len(made) == sizes[0] * sizes[1] * sizes[2] * sizes[3] * sizes[4]
    assert all(0 <= n < size for place in made for n, size in zip(place, sizes, strict=True))
    blocks = -(-given.depth // text["TILE_DEPTH"])
    for parts in terms.values():
        assert all(depth > 0 for _, depth in parts)
        covered = [k for first, depth in sorted(parts) for k in range(first, first + depth)]
        assert covered == list(range(blocks))
    assert p.row_tiles * text["TILE_ROWS"] >= given.rows
    assert p.column_tiles * text["TILE_COLUMNS"] >= given.columns
    assert main.grid == (min(multiprocessors, p.tiles), 1)


@pytest.mark.parametrize("name", SUMMED)
def test_parts_are_as_many_as_keep_a_device_busy(name):
    p = parameters(summed(name).steps[0])
    splits = parameters(summed(name).steps[1]).splits
    tiles = p.tiles // splits
    assert splits == 1 or p.tiles <= gradient.WAVES * PROCESSORS
    assert splits == 1 or p.split_depth >= gradient.MIN_PART
    blocks = -(-SUMMED[name].depth // 64)
    assert splits > 1 or tiles > PROCESSORS // 2 or blocks < 2 * gradient.MIN_PART


@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_parts_are_where_the_last_launch_adds_them_up(name):
    given, found = SUMMED[name], summed(name)
    main, reduce = found.steps
    p, sums = parameters(main), parameters(reduce)
    assert p.partial == sums.partial == ADDRESSES["workspace"]
    assert sums.out == ADDRESSES["out"]
    # Vectors of two columns are stored, of four added up.
    assert p.pitch % 4 == 0 and p.pitch == sums.runs * 4 >= given.columns
    assert sums.split_stride == given.blocks * given.lanes * given.rows * p.pitch == sums.total * 4
    assert found.workspace == 4 * sums.splits * sums.split_stride
    strides = [getattr(sums, f"out_{n}_stride") for n in ("block", "lane", "row", "column")]
    assert strides == list(given.out[:4])


@pytest.mark.parametrize("name", SUMMED)
def test_tensor_maps_are_the_operands(name):
    given = SUMMED[name]
    main = summed(name).steps[0]
    text = text_of(main.spec.source)
    assert [name for name, _ in main.pointers] == ["left", "right", "workspace"]
    widths = (text["TILE_ROWS"], text["TILE_COLUMNS"])
    sides = (given.left, given.rows), (given.right, given.columns)
    for each, (side, count), width in zip(main.maps, sides, widths, strict=True):
        assert each.dtype == given.dtype and each.swizzle == each.box[0] * 2 == 128
        pairs = list(zip(each.sizes, (2, *each.strides), strict=True))
        expected = [
            (given.blocks, side.block), (given.lanes, side.lane), (count, side.line),
            (given.depth, side.depth),
        ]  # fmt: skip
        assert sorted((n, s) for n, s in pairs if n > 1) == sorted(
            (n, 2 * s) for n, s in expected if n > 1
        )
        assert all(0 < s < 2**40 and s % 16 == 0 for s in each.strides)
        lines = text["BATCH_LAST"]
        assert each.box == (64, 1, 64 if lines else width, 1)
        assert text["RIGHT_LINES"] == lines == (side.line == 1)


def test_stages_fit_the_shared_memory():
    made = [
        spec
        for width in range(8, 700, 8)
        for spec in WeightGradient().specs((), Scope((width, width, 1), NUMBERS, ARCH), ARCH)
    ]
    assert len(set(made)) == len(gradient.COLUMNS) + len(gradient.WHOLE_COLUMNS)
    for spec in made:
        text = text_of(spec.source)
        assert spec.shared_bytes == 1024 + text["STAGES"] * text["STAGE_BYTES"]
        barriers = 8 * (2 * text["STAGES"] + 2)
        assert spec.shared_bytes + barriers <= targets.SHARED_BYTES[ARCH]
        assert text["STAGES"] >= 2 and text["STAGE_BYTES"] % 1024 == 0


@pytest.mark.parametrize(
    "given",
    [problem(rows=64, depth=4096), weight_gradient(2, 96, 48, 3), weight_gradient(2, 96, 48, 16)],
)
def test_an_epilogue_needs_the_whole_sum(given):
    found = lower(EPILOGUE, given, ARCH, PROCESSORS)
    assert entries(found)[-1] == "portable"
    assert "Gelu" in found.steps[-1].spec.description


# Turned operands.


def turned(problem, arch=ARCH, multiprocessors=PROCESSORS):
    """What lowering makes of a problem by way of batch last."""
    choices = lowering.candidates(problem, arch)
    choice = next(each for each in choices if each["kind"] == Turned.name)
    return lower((), problem, arch, multiprocessors, choice)


def test_a_launch_is_placed_in_other_tensors():
    """What it names and nobody places stays, and so does all that is no pointer."""
    step = lower((), weight_gradient(), ARCH, PROCESSORS).steps[0]
    assert step.pointers == (("left", 0), ("right", 0), ("workspace", 0))
    assert step.placed({}) == step
    once = step.placed({"left": ("workspace", 512), "workspace": ("workspace", 4096)})
    assert once.pointers == (("workspace", 512), ("right", 0), ("workspace", 4096))
    assert once._replace(pointers=step.pointers) == step and once.placed({}) == once
    twice = once.placed({"right": ("x", 64), "workspace": ("room", 256), "out": ("y", 0)})
    assert twice.pointers == (("room", 768), ("x", 64), ("room", 4352))


@pytest.mark.parametrize("arch", [ARCH, "sm_80"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [25088, 25089])
def test_turned_operands_lie_one_behind_the_other(arch, dtype, batch):
    given = weight_gradient(2, 96, 48, 3, batch=batch, dtype=dtype)
    found = turned(given, arch)
    left, right, *inner = found.steps
    itemsize, chunk = ITEMSIZE[dtype], 16 // ITEMSIZE[dtype]
    pitch = -(-batch // chunk) * chunk
    begin = 0
    for name, step, count in (("left", left, given.rows), ("right", right, given.columns)):
        p, features = parameters(step), given.blocks * count * given.lanes
        at = p.out - ADDRESSES["workspace"]
        assert getattr(p, "in") == ADDRESSES[name] and at >= begin and at % 256 == 0
        assert (p.rows, p.columns, p.row_stride) == (batch, features, getattr(given, name).depth)
        assert p.pitch == pitch and p.column_tiles == -(-features // 64)
        assert step.grid == (p.column_tiles * -(-batch // 64), 1)
        begin = at + features * pitch * itemsize
        assert (name, at) in [("left", 0), ("right", right.pointers[1][1])]
    offsets = {place for step in inner for name, place in step.pointers if name == "workspace"}
    assert offsets >= {0, right.pointers[1][1]}
    sums = max(offsets)
    assert sums >= begin and sums % 256 == 0
    reduce = parameters(inner[-1])
    assert found.workspace == sums + 4 * reduce.splits * reduce.split_stride
    assert not any(name in ("left", "right") for step in inner for name, _ in step.pointers)


def test_what_sums_finds_each_feature_where_it_has_been_turned_to():
    given = weight_gradient(2, 5, 7, 3, batch=2001)
    turned = transposed_problem(given)
    pitch = 2008
    for before, after, count in (
        (given.left, turned.left, given.rows), (given.right, turned.right, given.columns),
    ):  # fmt: skip
        for i in range(given.blocks):
            for line in range(count):
                for l in range(given.lanes):
                    feature = i * before.block + line * before.line + l * before.lane
                    assert i * after.block + line * after.line + l * after.lane == feature * pitch
        assert (after.depth, after.alignment) == (1, 16)
    assert turned.out == given.out


VECTORS = [  # dtype, stride of rows, alignment, whether rows take 16-byte loads
    ("float16", 576, 16, 1), ("float16", 576, 0, 1), ("float16", 576, 8, 0),
    ("float16", 580, 16, 0), ("float32", 580, 16, 1), ("float32", 578, 16, 0),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "stride", "alignment", "vectors"), VECTORS)
def test_wide_loads_are_chosen_only_where_every_one_is_aligned(dtype, stride, alignment, vectors):
    given = weight_gradient(2, 96, 48, 3, dtype=dtype)
    left = given.left._replace(depth=stride, alignment=alignment)
    p = parameters(turned(given._replace(left=left)).steps[0])
    assert p.vectors == vectors


def test_choices_of_turned_problems_are_those_of_what_sums_them():
    given = weight_gradient(2, 96, 48, 3, dtype="float32")
    known = [c for c in lowering.candidates(given, "sm_80") if c["kind"] == "turned"]
    assert [(c["rows"], c["columns"]) for c in known] == [(128, 64), (64, 64)]
    for choice in known:
        found = lower((), given, "sm_80", 108, {k: str(v) for k, v in choice.items()})
        assert f" {choice['rows']}x{choice['columns']} " in found.steps[2].spec.description


def test_more_terms_than_a_launch_sums_are_refused():
    with pytest.raises(UnsupportedError, match="slices"):
        lower((), weight_gradient(1, 1, 1, 2, batch=2**32), ARCH, PROCESSORS)
