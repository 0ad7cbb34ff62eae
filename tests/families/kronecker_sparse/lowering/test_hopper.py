"""Lowering of Kronecker-sparse products to Hopper's kernels: which problems they take, parameters,
tensor maps, shared memory, generated source."""

import itertools

import pytest

import kernlib as kl
from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.lanes.interleaved import Interleaved
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering import shapes
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, Scope, is_small
from kernlib.jit import targets
from tests.families.kronecker_sparse.lowering.cases import (
    ADDRESSES,
    ARCH,
    ITEMSIZE,
    KINDS,
    PROCESSORS,
    SAMPLE,
    batch_last,
    choices,
    kind_of,
    kinds_of,
    lowered,
    main_of,
    parameters,
    problem,
    text_of,
    weight_gradient,
    with_lanes,
)
from tests.support.kernels import stem

EPILOGUES = [(), (kl.Bias(),), (kl.Bias(), kl.Scale(), kl.Gelu(), kl.Bias("late"))]


TAKEN = {  # by name: a problem and its kind
    "batch first, d = 1": (problem(), "hopper"),
    "batch last, d = 1": (batch_last(), "hopper"),
    "batch last, d > 1": (batch_last(lanes=3), "hopper"),
    "float32": (problem(dtype="float32"), "hopper"),
    "one row": (problem(rows=1, lanes=1), "hopper"),
    "one input feature": (problem(blocks=1, depth=1, left=Layout(0, 0, 8, 7)), "hopper"),
    "rows wider than they need be": (problem(left=Layout(48, 1, 1024, 1)), "hopper"),
    "weights of any strides": (problem(right=Layout(3, 5, 7, 11, 2)), "hopper"),
    "expanded weights": (problem(right=Layout(0, 0, 0, 0)), "hopper"),
    "addresses that are 0 modulo 16": (problem(left=Layout(48, 1, 96, 1, 0)), "hopper"),
    **{f"d = {d}": (with_lanes(d), "interleaved") for d in (2, 3, 4, 8, 16, 24, 32, 64)},
    **{f"float32 d = {d}": (with_lanes(d, "float32"), "interleaved") for d in (2, 4, 8, 12, 16)},
    "d = 16 apart": (with_lanes(16, left=Layout(48 * 32, 1, 96 * 32, 32)), "interleaved"),
    # 16 bytes
    "d = 12": (with_lanes(12), "portable"),
    "float32 d = 6": (with_lanes(6, "float32"), "portable"),
    "float32 d = 3": (with_lanes(3, "float32"), "portable"),
    "rows of 98 elements": (problem(depth=49), "portable"),
    "rows of the result of 97": (problem(blocks=1, columns=97), "portable"),
    "lines of the result that end in a chunk": (
        problem(blocks=1, columns=97, out=OutLayout(0, 0, 104, 1)), "portable",
    ),
    "one output feature": (problem(blocks=1, columns=1, out=OutLayout(0, 0, 8, 7)), "portable"),
    "blocks of 4 elements": (problem(left=Layout(4, 1, 96, 1)), "portable"),
    "an odd batch, last": (batch_last(rows=25089), "portable"),
    "x that begins in a chunk": (problem(left=Layout(48, 1, 96, 1, 8)), "portable"),
    "a result that begins in a chunk": (problem(out=OutLayout(96, 1, 192, 1, 2)), "portable"),
    # strides
    "every second feature": (problem(left=Layout(96, 2, 192, 2)), "portable"),
    "every second l": (with_lanes(16, left=Layout(48 * 32, 2, 96 * 32, 32)), "portable"),
    "every second row, last": (batch_last()._replace(left=Layout(96, 96, 2, 96)), "portable"),
    "expanded rows": (problem(left=Layout(48, 1, 0, 1)), "portable"),
    "expanded blocks": (problem(left=Layout(0, 1, 48, 1)), "portable"),
    "mixed layouts": (batch_last()._replace(out=problem().out), "portable"),
    "mixed layouts, float32": (
        batch_last(dtype="float32")._replace(out=problem().out), "portable",
    ),
    # sizes
    "2**40 bytes from row to row": (problem(left=Layout(48, 1, 2**39, 1)), "portable"),
    "2**31 tiles": (problem(rows=1, blocks=2**31 // 6 + 1), "portable"),
    "2**31 tiles of d = 2": (with_lanes(2, rows=1, blocks=2**31 // 12 + 1), "portable"),
    "2**31 - 128 features": (with_lanes(2, rows=1, columns=64, blocks=2**24 - 1), "interleaved"),
    "2**31 features": (with_lanes(2, rows=1, columns=64, blocks=2**24), "portable"),
    # other kinds
    "a deep product": (problem(rows=64, depth=4096), "gradient"),
    "a deep product in float32": (problem(rows=64, depth=4096, dtype="float32"), "portable"),
}  # fmt: skip


# Of l that are no whole sectors, and of so few that `portable` has them as fast.
BY_BATCH_LAST = ("d = 24", "d = 12", "float32 d = 12", "float32 d = 6")
OR_NOT = (*BY_BATCH_LAST, "float32 d = 3")


@pytest.mark.parametrize("name", TAKEN)
def test_each_kind_takes_what_the_copy_engine_can_address(name):
    given, kind = TAKEN[name]
    first = "transposed" if name in BY_BATCH_LAST else kind
    assert kind_of(given) == ("portable" if is_small(given) else first)
    kinds = set(kinds_of(given))
    assert kinds - {"transposed"} == {kind, "portable"}
    assert kind == "interleaved" or name in OR_NOT or "transposed" not in kinds


@pytest.mark.parametrize("arch", [arch for arch in targets.SHARED_BYTES if arch != ARCH])
def test_other_targets_take_the_portable_kernels(arch):
    for given, _ in TAKEN.values():
        assert kinds_of(given, arch) == ["portable"]
    made = lowering.variants(EPILOGUES[2], (2, 96, 48, 4), arch, tuple(ITEMSIZE), None)
    assert {stem(spec).removeprefix("kronecker_sparse_") for spec in made} == {
        "portable", "portable_pack", "split_k_sum", "transpose",
    }  # fmt: skip


WIDTHS = [  # dtype, precision, columns of a problem, of its tile
    ("float16", "fp32", 8, 16), ("float16", "fp32", 40, 48), ("bfloat16", "fp32", 96, 96),
    ("float16", "fp32", 136, 192), ("float16", "fp32", 256, 256), ("float16", "fp32", 320, 192),
    ("float16", "fp32", 384, 192), ("float16", "fp32", 512, 256), ("float32", "fp32", 100, 128),
    ("float32", "fp32", 132, 96), ("float32", "fp32", 160, 96), ("float32", "fp32", 256, 128),
    ("float32", "tf32", 100, 128), ("float32", "tf32", 132, 192), ("float32", "tf32", 256, 256),
    ("float32", "tf32", 384, 192), ("float32", "tf32", 512, 256),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "precision", "count", "columns"), WIDTHS)
def test_one_tile_holds_all_columns_or_few_are_padded(dtype, precision, count, columns):
    wide = {"columns": count, "out": OutLayout(1024, 1, 8192, 1)}
    given = problem(dtype=dtype, precision=precision, **wide)
    row = 128 // ITEMSIZE[dtype]
    known = [c["columns"] for c in Hopper().choices(given, ARCH)]
    assert known[0] == columns
    assert known == [columns] if count <= columns else all(width % row == 0 for width in known)


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_epilogues_go_over_the_staged_tile_where_tf32_leaves_no_registers(dtype, precision):
    for shape, tiling in shapes.shapes(dtype, precision).items():
        for columns in tiling.columns:
            variant = Interleaved.Variant(dtype, precision, shape, columns)
            full = precision == "tf32" and columns * shape.lanes // 2 == 128
            for epilogue, rest in (((), False), (EPILOGUES[1], full), (EPILOGUES[2], True)):
                text = text_of(Interleaved().spec(epilogue, variant, ARCH).source)
                assert (text["HEAD"], text["REST"]) == (bool(epilogue) and not full, rest)


# The parameter blocks.


def test_vectors_and_scalars_follow_the_operands():
    found = lowered(problem(right=Layout(48, 1, 1, 96)), EPILOGUES[2])
    step = main_of(found)
    names = ("left", "out", "workspace", "vector0", "vector1")
    assert step.pointers == tuple((name, 0) for name in names) and step.scalars == 1
    read = parameters(step)
    assert read.packed == ADDRESSES["workspace"]
    assert (read.vector0, read.vector1) == (ADDRESSES["vector0"], ADDRESSES["vector1"])
    assert (read.value0, read.device0) == (0.5, 900)
    merged, apart = (
        parameters(main_of(lowered(with_lanes(lanes), EPILOGUES[2], kind="interleaved")))
        for lanes in (4, 24)
    )
    for read in (merged, apart):
        assert (read.packed, read.vector1) == (ADDRESSES["workspace"], ADDRESSES["vector1"])
        assert (read.value0, read.device0) == (0.5, 900)
    assert (apart.x, apart.y) == (ADDRESSES["left"], ADDRESSES["out"])


@pytest.mark.parametrize("name", SAMPLE)
def test_the_parameters_say_what_the_problem_is(name):
    given = SAMPLE[name]
    for found in choices(given):
        step = main_of(found)
        read, text = parameters(step), text_of(step.spec.source)
        for field in ("blocks", "lanes", "rows", "columns", "depth"):
            assert getattr(read, field) == getattr(given, field)
        assert read.row_tiles == -(-given.rows // text["TILE_ROWS"])
        assert read.column_tiles == -(-given.columns // text["TILE_COLUMNS"])
        assert step.grid == (min(PROCESSORS, read.tiles), 1)
        names = [place for place, _ in step.pointers[: len(step.maps)]]
        assert names == ["left", "out", "right"][: len(step.maps)]


def test_strides_of_sectors_are_launch_arguments():
    given = with_lanes(24, left=Layout(48 * 24, 1, 5000, 32), out=OutLayout(7200, 1, 90000, 72))
    read = parameters(main_of(lowered(given)))
    assert (read.x_row, read.x_block, read.x_depth) == (5000, 48 * 24, 32)
    assert (read.y_row, read.y_block, read.y_column) == (90000, 7200, 72)


# Tensor maps.


def dimensions(sizes, strides):
    """Sizes and strides of all dimensions that have more than one entry, in any order."""
    return sorted((n, s) for n, s in zip(sizes, strides, strict=True) if n > 1)


@pytest.mark.parametrize("name", SAMPLE)
def test_tensor_maps_are_the_operands_within_the_rules_of_the_driver(name):
    given = SAMPLE[name]
    a, d, rows, columns, depth = given[:5]
    itemsize, left, out = ITEMSIZE[given.dtype], given.left, given.out
    expected = [
        ((a, d, rows, depth), left[:4]),
        ((a, d, rows, columns), out[:4]),
        ((a, d, columns, depth), given.right[:4]),
    ]
    if "interleaved" in kinds_of(given):  # all l of a feature side by side
        expected = [
            ((a, depth * d, rows), (left.block, 1, left.line)),
            ((a, columns * d, rows), (out.block, 1, out.row)),
        ]
    for found in choices(given):
        maps = main_of(found).maps
        for each, (sizes, strides) in zip(maps, expected, strict=False):
            steps = (itemsize, *each.strides)
            assert each.dtype == given.dtype
            assert (len(each.sizes), len(each.strides), len(each.box)) == (4, 3, 4)
            assert all(0 < size < 2**32 for size in each.sizes)
            assert all(0 < step < 2**40 and step % 16 == 0 for step in each.strides)
            assert all(0 < size <= 256 for size in each.box)
            assert each.box[0] * itemsize == each.swizzle == 128
            assert dimensions(each.sizes, steps) == dimensions(
                sizes, [stride * itemsize for stride in strides]
            )


@pytest.mark.parametrize("name", SAMPLE)
def test_boxes_are_the_parts_of_a_stage(name):
    for found in choices(SAMPLE[name]):
        step = main_of(found)
        if not step.maps:
            continue
        text, itemsize = text_of(step.spec.source), ITEMSIZE[SAMPLE[name].dtype]
        x, y, *w = ([n * itemsize for n in each.box][:1] + list(each.box[1:]) for each in step.maps)
        held = [size[0] * size[1] * size[2] * size[3] for size in (x, y, *w)]
        if stem(step.spec).endswith("interleaved"):
            assert held == [text["X_BLOCK_BYTES"], 64 * 128]
            assert text["OUT_BLOCK_BYTES"] == 64 * 128
        else:
            assert text["X_BYTES"] % held[0] == 0
            assert held[1] == text["PART_BLOCK_BYTES"] or text["TILE_COLUMNS"] < text["ROW"]
            assert held[2:] == [text["W_BYTES"]] * len(w)


# Shared memory.


def all_variants(*widths):
    found = []
    for width in widths:
        for depth in (64, 128, 256, 1024):
            scope = Scope((width, depth, 1), tuple(KINDS), ARCH)
            for kernel in (Hopper(), Interleaved()):
                found += kernel.specs((), scope, ARCH)
    return list(dict.fromkeys(spec for spec in found if not stem(spec).endswith("pack")))


def out_bytes(text):
    """The staged parts of y of both warpgroups."""
    if "PART_BYTES" in text:
        return text["WARPGROUPS"] * text["OUT_PARTS"] * text["PART_BYTES"]
    return text["OUT_SLOTS"] * text["OUT_BYTES"] * (1 if text["HALVES"] == 2 else 2)


def test_stages_and_tiles_fit_the_shared_memory():
    made = all_variants(16, 32, 48, 64, 96, 128, 192, 256, 1000)
    assert len(made) > 150
    for spec in made:
        text = text_of(spec.source)
        resident = text.get("RESIDENT_BYTES", 0)
        parts = resident, text["STAGES"] * text["STAGE_BYTES"], out_bytes(text)
        assert spec.shared_bytes == 1024 + sum(parts)
        barriers = 8 * (2 * text["STAGES"] + 2)
        assert spec.shared_bytes + barriers <= targets.SHARED_BYTES[ARCH]
        assert 2 <= text["STAGES"] <= 8
        # The swizzle goes by the address.
        assert resident % 1024 == text["X_BYTES"] % 1024 == text["STAGE_BYTES"] % 1024 == 0
        assert out_bytes(text) % 2048 == 0
        assert spec.threads == text["THREADS"] == 384


def test_weights_stay_where_they_fit():
    def resident(**changes):
        return text_of(main_of(lowered(problem(**changes))).spec.source)["RESIDENT"]

    assert [resident(depth=depth) for depth in (48, 64, 72, 256, 264)] == [1, 1, 2, 4, 0]
    assert resident(columns=256, depth=256) == 4
    assert resident(columns=128, depth=128, dtype="float32") == 4  # 128 KiB: high and low words
    assert resident(columns=512, depth=64, blocks=8) == 1
    assert resident(columns=512, depth=64, blocks=1000) == 0


# Launches that begin before the one before has ended.

OTHERS = {  # of which every kind takes some, by way of every other
    "a weight's gradient of few rows": weight_gradient(batch=1000, dtype="float32"),
    "a weight's gradient": weight_gradient(),
    "a weight's gradient, float32": weight_gradient(dtype="float32"),
    "a weight's gradient, d = 3": weight_gradient(d=3),
    "a weight's gradient, d > 1": weight_gradient(d=16),
    "a weight's gradient, d > 1, batch last": weight_gradient(d=16, last=True),
    "large": with_lanes(64, blocks=1, columns=768, depth=192),
    "large, in slices": with_lanes(64, "float32", blocks=4, columns=256, depth=256),
    "an odd batch, last": batch_last(rows=25089),
}


@pytest.mark.parametrize("name", [*SAMPLE, *OTHERS])
def test_only_what_reads_the_launch_right_before_it_overlaps(name):
    given = (SAMPLE | OTHERS)[name]
    for choice in lowering.candidates(given, ARCH):
        steps = lowering.lower((), given, ARCH, PROCESSORS, choice).steps
        packs = [stem(step.spec) == "kronecker_sparse_pack" for step in steps]
        overlaps = [step.overlaps for step in steps]
        if choice["kind"] == "interleaved_gradient":
            assert overlaps == [False, True, False]
        else:
            is_packed = choice["kind"] == "hopper" and any(packs)
            assert overlaps == ([False, True] if is_packed else [False] * len(steps))
        for before, step in itertools.pairwise(steps):
            if step.overlaps:
                is_packed = stem(before.spec) == "kronecker_sparse_pack"
                assert is_packed or stem(before.spec) == "kronecker_sparse_deinterleave"
                read = step.pointers[len(step.maps) if is_packed else 1]
                assert read == before.pointers[1] == ("workspace", 0)


@pytest.mark.parametrize("name", SAMPLE)
def test_what_overlaps_waits_for_what_permits_it(name):
    for found in choices(SAMPLE[name]):
        if main_of(found).overlaps:
            before, own = (text_of(step.spec.source).text for step in found.steps)
            assert text_of(main_of(found).spec.source)["PACKED"]
            assert "wait_for_prerequisites();" in own.partition(" produce(")[2]
            assert "launch_dependents();" in before.partition("kronecker_sparse_pack(")[2]


# Generated source.
