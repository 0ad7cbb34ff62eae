"""Packed weights of Hopper's kernels: hopper/pack.cuh puts each number where the kernels look for
it, in the order in which their matrix instructions take the depth."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.lowering import hopper, interleaved
from kernlib.families.kronecker_sparse.lowering import pack as packing
from kernlib.families.kronecker_sparse.lowering.choose import Layout
from tests.families.kronecker_sparse.lowering.cases import (
    KINDS,
    batch_last,
    choices,
    parameters,
    problem,
    text_of,
)
from tests.support.kernels import stem

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
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
    assert 0 <= step.grid[0] * text["THREADS"] - p.total < text["THREADS"]
    index = np.arange(p.total)
    at = text.run(between(body, "int groups", "if (chunk >="), p=p, index=index)
    exists = at.chunk < at.chunks
    at = {name: getattr(at, name)[exists] for name in ("l", "chunk", "j", "i")}
    read = loaded(given, text, p, body, at, memory)
    size, chunk = text["CHUNK"] * text["TOGETHER"], text["CHUNK"]
    out = np.full(text["COPIES"] * exists.sum() * size, -(10**9))
    writes = np.zeros(out.size, int)
    sizes = vars(text.run(between(body, "constexpr int LANE", "for (int m")))
    code = between(body, "int lane", "Vector<InputT, CHUNK> high")
    for m in range(text["TOGETHER"]):
        place = text.run(code, p=p, m=m, **at, **sizes).place
        for e in range(chunk):
            for copy, sign in enumerate((1, -1)[: text["COPIES"]]):
                to = (place + copy * text["SPAN"] * sizes["LANE"]) * chunk + e
                np.add.at(writes, to, 1)
                out[to] = sign * read[e][m]
    assert (writes == 1).all()
    return out


def loaded(given, text, p, body, at, memory):
    """What each thread reads: TOGETHER numbers of each of CHUNK, zeros outside of the weight."""
    for code in (
        "if (index >= p.total) return;",
        "if (chunk >= chunks) return;",
        "Vector<InputT, TOGETHER> read[CHUNK] = {};",
        "if (l < p.lanes && j < p.columns && k < p.depth)",
        "load_vector<InputT, TOGETHER>(from + k * p.depth_stride);",
        "for (int m = 0; m < TOGETHER; ++m)",
        "split(read[e].element[m], high.element[e], low.element[e]);",
        "store_vector(p.packed + place * CHUNK, high);",
        "if (COPIES == 2) store_vector(p.packed + (place + SPAN * LANE) * CHUNK, low);",
    ):
        assert code in body
    source = re.search(r"from =\s*p.weight \+ (.*?);", body, re.S)[1]
    first = text.run(f"i64 first = {source};", p=p, **at).first
    base = given.right.alignment % 16 // ITEMSIZE[given.dtype]
    found = []
    for e in range(text["CHUNK"]):
        names = {**at, "ORDER": np.array(text["ORDER"]), "e": e}
        k = text.run(between(body, "int position", "if (l <"), **names).k
        inside = (at["l"] < p.lanes) & (at["j"] < p.columns) & (k < p.depth)
        begin = first + k * p.depth_stride
        assert ((base + begin[inside]) % text["TOGETHER"] == 0).all()  # of aligned bytes
        assert (at["l"][inside] + text["TOGETHER"] <= p.lanes).all()
        places = np.where(inside, begin, 0) + np.arange(text["TOGETHER"])[:, None]
        found.append(np.where(inside, memory[np.where(inside, places, 0)], 0))
    return found


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
        return loaded_order(given.dtype, interleaved.shape_of(given))
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


# The loads of interleaved/multiply.cuh, of elements (k, l) in place of numbers.


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


SHAPES = [
    (dtype, precision, shape)
    for dtype, precision in KINDS
    for shape in interleaved.shapes(dtype, precision)
]


@pytest.mark.parametrize(("dtype", "precision", "shape"), SHAPES)
def test_the_order_is_a_permutation_and_that_of_the_loads(dtype, precision, shape):
    order = interleaved.depth_order(dtype, shape)
    assert sorted(order) == list(range(len(order)))
    assert interleaved.shapes(dtype, precision)[shape].depth % len(order) == 0
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
    # Of 4 l, 1 at a time, 256 lines by 16 chunks of 8: by warps of 8 lines and 4 chunks.
    assert p.total == 5 * 4 * (256 // 8) * (16 // 4) * 32
    assert step.grid == (-(-p.total // packing.THREADS), 1)
    assert made.workspace(given) == 5 * 4 * 256 * 16 * 16
    assert made._replace(products=3).workspace(given) == 2 * 5 * 4 * 256 * 16 * 16


@pytest.mark.parametrize(("depth", "parts"), [(16, 1), (32, 1), (33, 2), (160, 5)])
def test_chunks_that_fill_no_warp_have_one_of_their_own(depth, parts):
    given = problem(blocks=3, lanes=2, columns=24, depth=depth)
    p = parameters(packing.step(given, packing.Packing("float16", 24, 16, 2, 1)))
    assert p.total == 3 * 1 * (24 // 8) * parts * 32


# Neighbouring l that a thread reads together.

HALF, SINGLE = packing.Packing("float16", 32, 16, 8, 1), packing.Packing("float32", 32, 16, 4, 3)


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
    given, made, together = TOGETHER[name]
    step = packing.step(given, made)
    text, p = text_of(step.spec.source), parameters(step)
    assert text["TOGETHER"] == together
    assert step.spec == packing.chosen(given, made) and step.spec in packing.specs(made)
    assert f" by {together}" in step.spec.description
    spans = -(-given.lanes // made.span)
    chunks = text["CHUNKS"] * p.stages
    parts = -(-chunks // 4)
    assert spans * made.span % together == given.lanes % together == 0
    groups = spans * made.span // together
    assert p.total == given.blocks * groups * p.column_tiles * made.columns // 8 * parts * 32


@pytest.mark.parametrize("made", [HALF, SINGLE])
def test_a_packing_has_a_variant_for_each_number_of_l_up_to_16_bytes(made):
    texts = [text_of(spec.source) for spec in packing.specs(made)]
    known = [text["TOGETHER"] for text in texts]
    assert known == list(made.together) == sorted({n for n in (1, 2, 4, 8) if n <= known[0]})[::-1]
    assert known[0] * ITEMSIZE[made.dtype] == 16
    assert len({spec.description for spec in packing.specs(made)}) == len(known)
    for text in texts:
        assert (text["SPAN"], text["CHUNK"]) == (made.span, 16 // ITEMSIZE[made.dtype])


def test_a_weight_that_no_grid_holds_is_refused():
    given = problem(blocks=2**30, rows=1, columns=256, depth=1024)
    with pytest.raises(UnsupportedError, match=r"1073741824 x 256 x 1024 x 1 numbers .* slices"):
        packing.step(given, packing.Packing("float16", 256, 64, 1, 1))
