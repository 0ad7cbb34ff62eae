"""Packed weights of Hopper's kernels: hopper/pack.cuh puts each number where the kernels look for
it."""

from types import SimpleNamespace

import pytest
import torch

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.kernels.lanes import interleaved
from kernlib.families.kronecker_sparse.kernels.steps.pack import Pack, Packing
from kernlib.families.kronecker_sparse.lowering import shapes
from kernlib.families.kronecker_sparse.lowering.problem import Layout
from tests.families.kronecker_sparse.lowering.cases import (
    ITEMSIZE,
    KINDS,
    batch_last,
    choices,
    launch,
    parameters,
    problem,
    text_of,
)
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.kernels import stem

SMALL = {"rows": 100, "columns": 40, "depth": 24}
TRANSPOSED = {"right": Layout(40 * 24, 1, 1, 40)}


def weight(apart, lane=1, **changes):
    """Layout of a weight of SMALL with (j, k) so far apart."""
    return Layout(40 * 24 * apart, lane, 24 * apart, apart, **changes)


PACKED = {
    "strided": problem(blocks=3, right=Layout(40 * 24 * 2, 1, 2, 80), **SMALL),
    "several tiles and stages": problem(**SMALL | {"columns": 264, "depth": 136}, **TRANSPOSED),
    "batch last": batch_last(lanes=3, **SMALL | {"rows": 104}),
    "float32": problem(dtype="float32", **SMALL),
    "tf32": problem(dtype="float32", precision="tf32", **SMALL),
    "float32, batch last": batch_last(lanes=3, dtype="float32", **SMALL | {"columns": 150}),
    **{
        f"{dtype} {precision} d = {d}": problem(
            lanes=d, dtype=dtype, precision=precision, **SMALL | {"rows": 104}
        )
        for dtype, precision in KINDS
        for d in (2, 4, 8, 16, 24)
    },
    "a stage and a bit": problem(lanes=4, **SMALL | {"depth": 18}),
    # Of which a thread reads fewer l together.
    **{
        f"d = 16, {alignment} bytes behind 16": problem(
            lanes=16, **SMALL, right=weight(16, alignment=alignment)
        )
        for alignment in (8, 4, 2)
    },
    "d = 8, lines apart by 12": problem(lanes=8, **SMALL, right=weight(12)),
    "d = 8, lines apart by 9": problem(lanes=8, **SMALL, right=weight(9)),
    "d = 8, l apart": problem(lanes=8, **SMALL, right=weight(16, lane=2)),
    "d = 8, l last": problem(lanes=8, **SMALL, right=Layout(7680, 960, 24, 1)),
    "d = 24, float32, 8 bytes behind 16": problem(
        lanes=24, dtype="float32", **SMALL, right=weight(24, alignment=8)
    ),
    "d = 4, batch last": batch_last(lanes=4, **SMALL | {"rows": 104}),
    "d = 12, batch last, tf32": batch_last(
        lanes=12, dtype="float32", precision="tf32", **SMALL | {"rows": 104}
    ),
    "d = 16, batch last, many tiles": batch_last(
        lanes=16, rows=104, columns=264, depth=136, right=Layout(264 * 136 * 16, 1, 16, 264 * 16)
    ),
}


def steps(given):
    found = choices(given)[0]
    assert stem(found.steps[0].spec) == "kronecker_sparse_pack"
    return found


def between(text, start, end):
    first = text.index(start)
    return text[first : text.index(end, first)]


@pytest.fixture
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


def weight_of(given):
    """The memory of a weight, and its numbers (i, l, j, k)."""
    dtype = getattr(torch, given.dtype)
    shape = (given.blocks, given.lanes, given.columns, given.depth)
    reach = sum((size - 1) * by for size, by in zip(shape, given.right[:4], strict=True))
    skipped = given.right.alignment % 16 // dtype.itemsize
    memory = torch.randn(skipped + reach + 1).to(dtype)[skipped:]
    return memory, memory.as_strided(shape, given.right[:4], skipped)


def tf32(x):
    """Rounded; half types as they are."""
    if x.dtype != torch.float32:
        return x
    return ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", PACKED)
def test_each_number_is_where_the_matrix_unit_reads_it(name, emulator, seed):
    given = PACKED[name]
    found = steps(given)
    pack, main = found.steps
    text = text_of(main.spec.source)
    span, columns, depth = text.get("SPAN", 1), text["TILE_COLUMNS"], text["TILE_DEPTH"]
    spans, tiles, stages = (
        -(-n // size)
        for n, size in zip((given.lanes, *given[3:5]), (span, columns, depth), strict=True)
    )
    memory, weight = weight_of(given)
    padded = weight.new_zeros(given.blocks, spans * span, tiles * columns, stages * depth)
    padded[:, : given.lanes, : given.columns, : given.depth] = weight
    # By position along the depth, of each of which `order` says which k it stands for.
    order = torch.tensor(order_of(given))
    groups = padded.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
    # (i, span, l, tile, j, stage, chunk, k) to (i, span, tile, stage, l, chunk, j, k)
    chunk = 16 // ITEMSIZE[given.dtype]
    parts = groups.reshape(
        given.blocks, spans, span, tiles, columns, stages, depth // chunk, chunk
    ).permute(0, 1, 3, 5, 2, 6, 4, 7)
    high = tf32(parts)
    copies = [high, tf32(parts - high)][: text["COPIES"]]
    wanted = torch.stack(copies, 4).flatten()
    made = torch.full((found.workspace // ITEMSIZE[given.dtype],), torch.nan, dtype=weight.dtype)
    launch(emulator, pack, {"right": memory, "workspace": made})
    assert torch.equal(made, wanted)


def order_of(given):
    """Which k stands at each position along the depth of a matrix instruction: batch last by the
    loads of x in the multiplying kernel's source."""
    if given.lanes > 1 and given.left.lane == 1:
        return interleaved.depth_order(given.dtype, shapes.shape_of(given))
    if given.dtype != "float32" or given.left.line != 1:
        return (0,)
    near, far = (1, 1), (1, 1)
    text = text_of(steps(given).steps[1].spec.source)
    declared = between(text.text, "int near = BATCH_LAST", ";") + ";"
    near, far = zip(
        *((made.near, made.far) for made in (text.run(declared, k=k) for k in range(4))),
        strict=True,
    )
    return near + far


SHAPES = [
    (dtype, precision, shape)
    for dtype, precision in KINDS
    for shape in shapes.shapes(dtype, precision)
]


@pytest.mark.parametrize(("dtype", "precision", "shape"), SHAPES)
def test_the_order_is_a_permutation(dtype, precision, shape):
    order = interleaved.depth_order(dtype, shape)
    assert sorted(order) == list(range(len(order)))
    assert shapes.shapes(dtype, precision)[shape].depth % len(order) == 0
    assert len(order) * ITEMSIZE[dtype] % 32 == 0


@pytest.mark.parametrize("name", PACKED)
def test_a_tile_reads_the_stages_of_its_columns(name):
    given = PACKED[name]
    pack, main = steps(given).steps
    text, p = text_of(main.spec.source), parameters(main)
    span = text.get("SPAN", 1)
    stages = -(-given.depth // text["TILE_DEPTH"])
    assert text["W_BYTES"] == steps(given).workspace // (
        given.blocks * -(-given.lanes // span) * p.column_tiles * stages
    )
    body = text.body("void load_weights(")
    address = between(body, "p.packed + ", ", barrier").removeprefix("p.packed + ")
    places = []
    for i in range(given.blocks):
        for lane in range(0, given.lanes, span):
            for column in range(p.column_tiles):
                tile = SimpleNamespace(block=i, lane=lane, column=column, depth=stages)
                for stage in range(stages):
                    code = between(body, "i64 ", "load_bytes") + f"i64 at = {address};"
                    names = {"block": stage, "stage": stage, "stages": stages}
                    places.append(text.run(code, p=p, tile=tile, **names).at)
    assert places == [n * text["W_BYTES"] for n in range(len(places))]
    assert pack.pointers[-1] == ("workspace", 0) and ("workspace", 0) in main.pointers


# Neighbouring l that a thread reads together.

HALF, SINGLE = Packing("float16", 32, 16, 8, 1), Packing("float32", 32, 16, 4, 3)


def of(lanes, apart=None, dtype="float16", **changes):
    """A problem of a weight with (j, k) ``apart``, or as ``changes`` of its layout have it."""
    made = weight(lanes if apart is None else apart)._replace(**changes)
    return problem(lanes=lanes, dtype=dtype, **SMALL, right=made)


TOGETHER = {  # by name: a problem, its packing, how many
    "d = 1": (of(1), HALF, 1),
    "d = 2": (of(2), HALF, 2),
    "d = 3": (of(3), HALF, 1),
    "d = 4": (of(4), HALF, 4),
    "d = 6": (of(6), HALF, 2),
    "d = 8": (of(8), HALF, 8),
    "d = 12": (of(12), HALF, 4),
    "d = 24": (of(24), HALF, 8),
    "d = 8 of tiles of 2": (of(8), HALF._replace(span=2), 8),
    "d = 4 of tiles of 1": (of(4), HALF._replace(span=1), 4),
    "d = 2 of tiles of 16": (of(2), HALF._replace(span=16), 2),
    "float32 d = 8": (of(8, dtype="float32"), SINGLE, 4),
    "float32 d = 6": (of(6, dtype="float32"), SINGLE, 2),
    "float32 d = 5": (of(5, dtype="float32"), SINGLE, 1),
    "16 bytes behind 16": (of(8, alignment=0), HALF, 8),
    "8 bytes": (of(8, alignment=8), HALF, 4),
    "4 bytes": (of(8, alignment=4), HALF, 2),
    "12 bytes": (of(8, alignment=12), HALF, 2),
    "2 bytes": (of(8, alignment=2), HALF, 1),
    "float32 8 bytes": (of(8, dtype="float32", alignment=8), SINGLE, 2),
    "float32 4 bytes": (of(8, dtype="float32", alignment=4), SINGLE, 1),
    "k apart by 12": (of(8, depth=12), HALF, 4),
    "k apart by 10": (of(8, depth=10), HALF, 2),
    "k apart by 9": (of(8, depth=9), HALF, 1),
    "lines apart by 196": (of(8, line=196), HALF, 4),
    "lines apart by 199": (of(8, line=199), HALF, 1),
    "blocks apart by 8000 and 2": (of(8, block=8002), HALF, 2),
    "expanded k": (of(8, depth=0), HALF, 8),
    "l apart by 2": (of(8, apart=16, lane=2), HALF, 1),
    "expanded l": (of(8, lane=0), HALF, 1),
    "l far apart": (of(8, lane=960, line=24, depth=1), HALF, 1),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_threads_read_as_many_l_together_as_are_aligned(name):
    given, packing, together = TOGETHER[name]
    step = Pack().step(given, packing)
    text = text_of(step.spec.source)
    assert text["TOGETHER"] == together
    assert step.spec in Pack().specs_of([packing])
    assert f" by {together}" in step.spec.description
    assert given.lanes % together == 0


def test_a_weight_that_no_grid_holds_is_refused():
    given = problem(blocks=2**30, rows=1, columns=256, depth=1024)
    with pytest.raises(UnsupportedError, match=r"1073741824 x 256 x 1024 x 1 numbers .* slices"):
        Pack().step(given, Packing("float16", 256, 64, 1, 1))
