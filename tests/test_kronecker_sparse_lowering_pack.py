"""Packed weights of Hopper's kernels: hopper_pack.cuh puts each number where the kernels look for
it, in the order in which their matrix instructions take the depth."""

from types import SimpleNamespace

import numpy as np
import pytest
from kronecker_sparse_lowering_cases import KINDS, batch_last, parameters, problem, text_of

from kernlib.errors import UnsupportedError
from kernlib.ops import kronecker_sparse_lowering as lowering
from kernlib.ops import kronecker_sparse_lowering_hopper as hopper
from kernlib.ops import kronecker_sparse_lowering_interleaved as interleaved
from kernlib.ops import kronecker_sparse_lowering_pack as packing
from kernlib.ops.kronecker_sparse_lowering import Layout

ARCH = "sm_90a"
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
SMALL = {"rows": 100, "columns": 40, "depth": 24}
TRANSPOSED = {"right": Layout(40 * 24, 1, 1, 40)}
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
}


def steps(given):
    found = lowering.lower((), given, ARCH, 132, lowering.candidates(given, ARCH)[0])
    assert found.steps[0].spec.entry == "kronecker_sparse_pack"
    return found


def between(text, start, end):
    first = text.index(start)
    return text[first : text.index(end, first)]


def numbered(given):
    """A weight whose numbers are all different, by element (i, l, j, k), and its memory."""
    shape = (given.blocks, given.lanes, given.columns, given.depth)
    places = sum(
        index * stride for index, stride in zip(np.indices(shape), given.right[:4], strict=True)
    )
    memory = np.arange(1, places.max() + 2, dtype=np.int64)
    return memory[places], memory


def packed(given, step, memory):
    """What the kernel writes, by its source, all threads at once; low words are negative."""
    text, p = text_of(step.spec.source), parameters(step)
    body = text.body("kronecker_sparse_pack(const")
    assert "if (index >= p.total) return;" in body
    assert 0 <= step.grid[0] * text["THREADS"] - p.total < text["THREADS"]
    index = np.arange(p.total)
    at = text.run(between(body, "int padded", "Vector<"), p=p, index=index)
    copies, order = text["COPIES"], np.array(text["ORDER"])
    out = np.full(copies * p.total * text["CHUNK"], -(10**9))
    to = text.run(between(body, "constexpr int LANE", "store_vector"), **vars(at))
    assert "p.packed + (place + SPAN * LANE) * CHUNK, low" in body
    for e in range(text["CHUNK"]):
        place = {**vars(at), "ORDER": order, "e": e}
        k = text.run(between(body, "int position", "if (l <"), **place).k
        inside = (at.l < p.lanes) & (at.j < p.columns) & (k < p.depth)
        source = at.i * p.block_stride + at.l * p.lane_stride + at.j * p.column_stride
        value = np.where(inside, memory[np.where(inside, source + k * p.depth_stride, 0)], 0)
        out[to.place * text["CHUNK"] + e] = value
        if copies == 2:
            low = (to.place + text["SPAN"] * to.LANE) * text["CHUNK"] + e
            out[low] = -value
    return out


@pytest.mark.parametrize("name", PACKED)
def test_each_number_is_where_the_matrix_unit_reads_it(name):
    given = PACKED[name]
    found = steps(given)
    text = text_of(found.steps[1].spec.source)
    weight, memory = numbered(given)
    span = text.get("SPAN", 1)
    columns, depth, chunk = text["TILE_COLUMNS"], text["TILE_DEPTH"], 16 // ITEMSIZE[given.dtype]
    spans, tiles, stages = (
        -(-n // size)
        for n, size in zip((given.lanes, *given[3:5]), (span, columns, depth), strict=True)
    )
    padded = np.zeros((given.blocks, spans * span, tiles * columns, stages * depth), np.int64)
    padded[:, : given.lanes, : given.columns, : given.depth] = weight
    # By position along the depth, of each of which `order` says which k it stands for.
    order = np.array(order_of(given))
    groups = padded.reshape(*padded.shape[:3], -1, len(order))[..., order].reshape(padded.shape)
    # (i, span, l, tile, j, stage, chunk, k) to (i, span, tile, stage, l, chunk, j, k)
    parts = groups.reshape(
        given.blocks, spans, span, tiles, columns, stages, depth // chunk, chunk
    ).transpose(0, 1, 3, 5, 2, 6, 4, 7)
    copies = text["COPIES"]
    made = packed(given, found.steps[0], memory)
    assert found.workspace == made.size * ITEMSIZE[given.dtype]
    made = made.reshape(given.blocks, spans, tiles, stages, copies, *parts.shape[4:])
    assert (made[:, :, :, :, 0] == parts).all()
    assert copies == 1 or (made[:, :, :, :, 1] == -parts).all()


def order_of(given):
    """Which k stands at each position along the depth of a matrix instruction, by the loads of x in
    the multiplying kernel's source."""
    if given.lanes > 1 and given.left.lane == 1:
        return loaded_order(given.dtype, interleaved._shape(given))
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


# The loads of interleaved_multiply.cuh, of elements (k, l) in place of numbers.


def fragments(dtype, shape, step, t, half):
    """The elements in registers 0 and 2 of thread t of a quad, for each l of its warpgroup."""
    size, chunk = ITEMSIZE[dtype], 16 // ITEMSIZE[dtype]
    row_depth = 128 // size // shape.span

    def load(block, place):
        inside = range(place * chunk, (place + 1) * chunk)
        return [(block * row_depth + e // shape.span, e % shape.span) for e in inside]

    a = [[None, None] for _ in range(shape.lanes)]
    for pair in range(2):
        if shape.lanes == 8:
            block = 4 * step + 2 * pair if shape.halves == 2 else 2 * step + pair
            x = load(block, 2 * t + half)
            y = load(block + 1, 2 * t + half) if shape.halves == 2 else load(block, 2 * t + 1)
            made = [(x[l], y[l]) for l in range(8)]
        elif shape.lanes == 4 and size == 2:
            x = load(step, 2 * t + pair)
            made = [(x[l], x[l + 4]) for l in range(4)]
        elif shape.lanes == 4:
            x = (
                load(2 * step + pair, 2 * t + half)
                if shape.halves == 2
                else load(step, 2 * t + pair)
            )
            made = [(x[l],) for l in range(4)]
        else:
            x = load(step // 2, 2 * t + step % 2)
            count = 2 if size == 2 else 1
            made = [tuple(x[2 * count * pair + l + 2 * e] for e in range(count)) for l in range(2)]
        for l in range(shape.lanes):
            a[l][pair] = made[l]
    return a


def loaded_order(dtype, shape):
    """The k of each position along the depth, of as many steps as it takes until they are all
    between the same bounds: a thread holds positions t of 4 bytes in both halves of 32."""
    found, step, each = [], 0, 4 // ITEMSIZE[dtype]
    while not found or sorted(found) != list(range(len(found))):
        made = [None] * (8 * each)
        for t in range(4):
            for half in range(shape.halves):
                for l, registers in enumerate(fragments(dtype, shape, step, t, half)):
                    for pair, elements in enumerate(registers):
                        for e, (k, lane) in enumerate(elements):
                            place = (4 * pair + t) * each + e
                            assert lane == half * shape.lanes + l
                            assert made[place] in (None, k)
                            made[place] = k
        found, step = found + made, step + 1
        assert step <= 2
    return tuple(found)


SHAPES = [(dtype, shape) for dtype, size in ITEMSIZE.items() for shape in interleaved.SHAPES[size]]


@pytest.mark.parametrize(("dtype", "shape"), SHAPES)
def test_the_order_is_a_permutation_and_that_of_the_loads(dtype, shape):
    order = interleaved.depth_order(dtype, shape)
    assert sorted(order) == list(range(len(order)))
    assert interleaved.SHAPES[ITEMSIZE[dtype]][shape][1] % len(order) == 0
    assert len(order) * ITEMSIZE[dtype] % 32 == 0
    known = loaded_order(dtype, shape)
    assert order == known or order == known + tuple(k + len(known) for k in known)


def test_batch_last_float32_has_an_order_of_its_own():
    given = PACKED["float32, batch last"]
    assert order_of(given) == hopper.BATCH_LAST_ORDER
    assert sorted(hopper.BATCH_LAST_ORDER) == list(range(8))


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


def test_the_parameters_are_the_struct_of_the_source():
    given = problem(
        blocks=5, lanes=3, rows=104, columns=200, depth=100, right=Layout(11, 12, 13, 14)
    )
    made = packing.Packing("float16", 64, 32, 2, 1)
    step = packing.step(given, made)
    p = parameters(step)
    strides = (p.block_stride, p.lane_stride, p.column_stride, p.depth_stride)
    assert strides == (11, 12, 13, 14)
    assert (p.lanes, p.columns, p.depth) == (3, 200, 100)
    assert (p.spans, p.column_tiles, p.stages) == (2, 4, 4)
    assert p.total == 5 * 2 * 2 * 4 * 64 * (4 * 32 // 8)
    assert made.workspace(given) == p.total * 16
    assert made._replace(products=3).workspace(given) == 2 * p.total * 16


def test_a_weight_that_no_grid_holds_is_refused():
    given = problem(blocks=2**30, rows=1, columns=256, depth=1024)
    with pytest.raises(UnsupportedError, match=r"1073741824 x 256 x 1024 x 1 numbers .* slices"):
        packing.step(given, packing.Packing("float16", 256, 64, 1, 1))
