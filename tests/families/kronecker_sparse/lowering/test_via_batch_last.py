"""Lowering of products of large factors by way of batch last: which go there, where x and result
lie in the workspace, and by the text of the kernel that transposes them what becomes of each
number."""

import ctypes
import functools
import itertools
import operator
import re
from types import SimpleNamespace

import numpy as np
import pytest

import kernlib as kl
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering import interleaved
from kernlib.families.kronecker_sparse.lowering import via_batch_last as transposed
from kernlib.families.kronecker_sparse.lowering.choose import Layout, OutLayout, Problem
from kernlib.jit import targets
from tests.families.kronecker_sparse.lowering.cases import (
    ADDRESSES,
    KINDS,
    batch_last,
    block,
    parameter_bytes,
    parameters,
    problem,
    text_of,
    weight_gradient,
)
from tests.support.kernels import stem

ARCH, PROCESSORS = "sm_90a", 132
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())


def factor(a, b, c, d, **changes):
    return problem(blocks=a, lanes=d, columns=b, depth=c, **changes)


def by_x(a, b, c, d, **changes):
    """The gradient by x of a factor: depths of the weight lie b * d apart."""
    right = Layout(b * c * d, 1, d, c * d)
    return factor(a, c, b, d, right=right, **changes)


def order(given, arch=ARCH):
    """Kinds of candidates, by preference."""
    return list(dict.fromkeys(choice["kind"] for choice in lowering.candidates(given, arch)))


def lowered(given, epilogue=(), processors=PROCESSORS):
    choice = transposed.candidates(given, ARCH)[0]
    return transposed.lower(epilogue, given, ARCH, processors, choice)


def entries(found):
    return [stem(step.spec).removeprefix("kronecker_sparse_") for step in found.steps]


# Which problems.

# Milliseconds on an H200, batch 25088: interleaved and transposed, in float16, TF32 and 3xTF32.
MEASURED = {
    (1, 768, 192, 64): ((5.88, 2.71), (8.65, 5.21), (14.4, 8.13)),
    (4, 1024, 1024, 16): ((19.3, 9.16), (54.5, 17.4), (80.0, 44.3)),
    (3, 512, 512, 16): ((2.59, 2.48), (7.70, 4.63), (14.2, 8.75)),
    (1, 256, 256, 16): ((0.238, 0.345), (0.608, 0.704), (1.26, 0.989)),
    (3, 192, 192, 16): ((0.410, 0.821), (1.08, 1.49), (2.02, 1.86)),
    (8, 48, 48, 64): ((1.56, 2.16), (2.46, 3.83), (3.15, 4.29)),
    (16, 1024, 1024, 4): ((8.10, 8.79), (17.5, 17.5), (52.8, 41.4)),
    (1, 1024, 1024, 4): ((0.492, 0.544), (1.07, 1.15), (3.46, 2.47)),
    (1, 512, 512, 4): ((0.136, 0.209), (0.277, 0.412), (0.806, 0.716)),
    (2, 64, 64, 64): ((0.499, 0.732), (0.722, 1.28), (1.10, 1.46)),
    (4, 192, 48, 16): ((0.233, 0.651), (0.611, 1.32), (1.13, 1.39)),
}
NUMBERS = [("float16", "fp32"), ("float32", "tf32"), ("float32", "fp32")]
CASES = [
    pytest.param(pattern, *numbers, *times, id=f"{pattern} {numbers[0]} {numbers[1]}")
    for pattern, measured in MEASURED.items()
    for numbers, times in zip(NUMBERS, measured, strict=True)
]


@pytest.mark.parametrize(
    ("pattern", "dtype", "precision", "of_interleaved", "of_transposed"), CASES
)
def test_factors_go_where_they_were_measured_to_be_faster(
    pattern, dtype, precision, of_interleaved, of_transposed
):
    given = factor(*pattern, dtype=dtype, precision=precision)
    first = order(given)[0]
    assert {first} | {"transposed", "interleaved"} == {"transposed", "interleaved"}
    if of_interleaved > 1.25 * of_transposed:
        assert first == "transposed"
    if of_interleaved < 1.05 * of_transposed:
        assert first == "interleaved"


@pytest.mark.parametrize(
    ("pattern", "dtype", "precision", "of_interleaved", "of_transposed"), CASES
)
def test_the_model_is_near_what_was_measured(
    pattern, dtype, precision, of_interleaved, of_transposed
):
    model = transposed.seconds(factor(*pattern, dtype=dtype, precision=precision))
    assert 0.5e-3 * of_interleaved <= model[0] <= 1.15e-3 * of_interleaved
    assert 0.84e-3 * of_transposed <= model[1] <= 1.1e-3 * of_transposed


@pytest.mark.parametrize("pattern", [(1, 768, 192, 64), (4, 1024, 1024, 16)], ids=str)
def test_gradients_by_x_and_other_half_types_go_the_same_way(pattern):
    for given in (factor(*pattern), by_x(*pattern), factor(*pattern, dtype="bfloat16")):
        assert order(given) == ["transposed", "interleaved", "portable"]


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_small_batches_are_not_worth_further_launches(dtype, precision):
    """Nor is `portable` for large weights, of which it reads each l by itself."""
    options = {"dtype": dtype, "precision": precision}
    for rows in (1, 8):
        assert order(factor(1, 64, 64, 64, rows=rows, **options))[0] == "portable"
    for rows in (1, 8, 64):
        assert order(factor(1, 768, 192, 64, rows=rows, **options))[0] == "interleaved"
    assert order(factor(1, 768, 192, 64, rows=8192, **options))[0] == "transposed"


LARGE = factor(1, 768, 192, 64)
ROW, OUT_ROW = 192 * 64, 768 * 64
TAKEN = {
    "as it is": LARGE,
    "rows of x apart": LARGE._replace(left=LARGE.left._replace(line=ROW + 64)),
    "rows of the result apart": LARGE._replace(out=LARGE.out._replace(row=OUT_ROW + 8)),
    "a batch of no whole chunk": LARGE._replace(rows=25089),
    "two rows": factor(1, 768, 192, 64, rows=2),
    "one block of any stride": LARGE._replace(left=LARGE.left._replace(block=0)),
    "weights of any strides": LARGE._replace(right=Layout(3, 5, 7, 11, 2)),
    "addresses that are 0 modulo 16": LARGE._replace(out=LARGE.out._replace(alignment=0)),
    "d = 3": factor(2, 64, 64, 3),
    "a misaligned x": LARGE._replace(left=LARGE.left._replace(alignment=8)),
    "a misaligned result": LARGE._replace(out=LARGE.out._replace(alignment=8)),
    "rows of the result that end in a chunk": factor(1, 3, 8, 2),
}
LEFT = {
    "k apart": LARGE._replace(left=Layout(0, 1, 2 * ROW, 128)),
    "j apart": LARGE._replace(out=OutLayout(0, 1, 2 * OUT_ROW, 128)),
    "blocks apart": factor(2, 64, 64, 16, left=Layout(2048, 1, 4096, 16)),
    "blocks of the result apart": factor(2, 64, 64, 16, out=OutLayout(2048, 1, 4096, 16)),
    "batch last": batch_last(lanes=16),
    "d = 1": factor(2, 64, 64, 1),
    "a deep product": factor(1, 64, 4096, 16, rows=64),
    "a gradient of a weight": weight_gradient(2, 96, 48, 16),
    "a gradient of few rows": weight_gradient(2, 96, 48, 16, batch=1000),
    "a gradient of one row": weight_gradient(1, 256, 8, 16, batch=1),
    "a gradient of one feature a group": weight_gradient(1, 1, 256, 16, batch=100),
    "one row": factor(1, 768, 192, 64, rows=1, left=Layout(0, 1, 0, 64)),
    "one input feature a group": factor(1, 256, 1, 64),
    "rows that overlap": LARGE._replace(left=LARGE.left._replace(line=64)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_rows_of_features_side_by_side_are_taken(name):
    assert "transposed" in order(TAKEN[name])
    assert entries(lowered(TAKEN[name]))[1:4] == ["transpose", "hopper", "transpose"]


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_other_kinds(name):
    assert "transposed" not in order(LEFT[name])


def test_a_batch_whose_last_slice_is_a_deep_product_is_left(monkeypatch):
    monkeypatch.setattr(transposed, "WORKSPACE", 384 * 2 * 16 * (1100 + 16))
    for rows, last, taken in ((1060, 292, True), (1000, 232, False)):
        given = factor(1, 16, 1100, 16, rows=rows)
        assert transposed.slices_of(given, 384)[-1][1] == last
        assert transposed.slice_rows(given) == 384
        assert ("transposed" in order(given)) == taken and "interleaved" in order(given)


@pytest.mark.parametrize("arch", [arch for arch in targets.SHARED_BYTES if arch != ARCH])
def test_other_targets_have_none(arch):
    assert order(LARGE, arch) == ["portable"]
    assert not transposed.variants([()], (768, 192), arch, KINDS)


def test_choices_are_those_of_the_product_batch_last():
    last = batch_last(lanes=64, blocks=1, columns=768, depth=192)
    known = [c for c in lowering.candidates(last, ARCH) if c["kind"] == "hopper"]
    own = [c for c in lowering.candidates(LARGE, ARCH) if c["kind"] == "transposed"]
    assert [{**choice, "kind": "hopper"} for choice in own] == known and len(own) > 1
    for choice in own:
        named = {name: str(value) for name, value in choice.items()}
        found = lowering.lower((), LARGE, ARCH, PROCESSORS, named)
        assert f"128x{choice['columns']} batch_last" in found.steps[2].spec.description


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_the_model_knows_the_tiles_of_the_other_kind(dtype, precision):
    for d in (2, 4, 8, 12, 16, 24, 32, 64):
        given = factor(2, 96, 48, d, dtype=dtype, precision=precision)
        if {"transposed", "interleaved"} <= set(order(given)):
            assert transposed.shape_of(given) == interleaved.shape_of(given)


@pytest.mark.parametrize("made", (factor, by_x))
@pytest.mark.parametrize("pattern", ((1, 768, 192, 64), (4, 1024, 1024, 16), (2, 40, 24, 8)))
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_what_is_launched_is_among_specs_and_variants(made, pattern, dtype, precision):
    given = made(*pattern, dtype=dtype, precision=precision)
    epilogue = EPILOGUE if made is factor else ()
    variants = lowering.variants(EPILOGUE, pattern, False, ARCH, (dtype,), precision)
    for choice in transposed.candidates(given, ARCH):
        found = transposed.lower(epilogue, given, ARCH, PROCESSORS, choice)
        specs = {step.spec for step in found.steps}
        assert specs == set(transposed.specs(epilogue, given, ARCH, choice))
        assert specs <= set(variants)


# Slices and the workspace.


@pytest.mark.parametrize("rows", (1, 127, 8191, 8320, 8321, 25088, 25089, 10**6))
def test_slices_cover_the_batch_in_tiles_and_fit_the_workspace(rows):
    given = LARGE._replace(rows=rows)
    each = transposed.slice_rows(given)
    parts = transposed.slices_of(given, each)
    assert [n for first, count in parts for n in (first, first + count)][1:-1] == [
        n for first, _ in parts[1:] for n in (first, first)
    ]
    assert parts[0][0] == 0 and sum(parts[-1]) == rows
    assert len(parts) == 1 or each % 128 == 0
    bytes_a_row = (ROW + OUT_ROW) * 2
    assert -(-each // 8) * 8 * bytes_a_row <= transposed.WORKSPACE
    most = transposed.WORKSPACE // bytes_a_row // 128 * 128
    assert len(parts) == -(-rows // most)


def test_rows_of_which_the_workspace_holds_no_tile_are_left():
    wide = factor(1, 2**16, 2**15, 64, rows=100)
    assert transposed.slice_rows(wide) == 0
    assert "transposed" not in order(wide) and "interleaved" in order(wide)


def spans(found):
    """Begin and end of what lies in the workspace: x, the result, and the rest."""
    turns = [step for step in found.steps if stem(step.spec).endswith("transpose")]
    x, y = turns[0].pointers[1][1], turns[1].pointers[0][1]
    rest = found.steps[0].pointers[1][1]
    ends = (x, y, rest, found.workspace)
    return list(itertools.pairwise(ends))


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("rows", (9, 1000, 25089))
def test_places_in_the_workspace_are_apart_and_aligned(rows, dtype, precision):
    given = factor(2, 40, 24, 16, rows=rows, dtype=dtype, precision=precision)
    found = lowered(given)
    assert entries(found) == ["pack", "transpose", "hopper", "transpose"]
    chunk = 16 // ITEMSIZE[dtype]
    pitch = -(-rows // chunk) * chunk
    part = lowering.KINDS["hopper"].lower(
        (), transposed.part_of(given, rows), ARCH, PROCESSORS, transposed.candidates(given, ARCH)[0]
    )
    sizes = [n * pitch * ITEMSIZE[dtype] for n in (2 * 24 * 16, 2 * 40 * 16)] + [part.workspace]
    for (begin, end), size in zip(spans(found), sizes, strict=True):
        assert begin % 256 == 0 and size <= end - begin < size + 256
    pack, before, main, after = found.steps
    (x, _), (y, _), (rest, _) = spans(found)
    assert pack.pointers == (("right", 0), ("workspace", rest))
    assert before.pointers == (("left", 0), ("workspace", x))
    assert main.pointers == tuple(("workspace", at) for at in (x, y, rest))
    assert after.pointers == (("workspace", y), ("out", 0))


def test_every_slice_uses_the_same_places_and_one_packed_weight():
    found = lowered(LARGE, EPILOGUE)
    parts = transposed.slices_of(LARGE, transposed.slice_rows(LARGE))
    assert entries(found) == ["pack"] + ["transpose", "hopper", "transpose"] * 3 and len(parts) == 3
    (x, _), (y, _), (rest, end) = spans(found)
    assert end - rest == 192 * 768 * 64 * 2 and rest <= transposed.WORKSPACE
    for (first, count), at in zip(parts, range(1, len(found.steps), 3), strict=True):
        before, main, after = found.steps[at : at + 3]
        assert before.pointers == (("left", first * ROW * 2), ("workspace", x))
        in_workspace = tuple(("workspace", place) for place in (x, y, rest))
        assert main.pointers == (*in_workspace, ("vector0", 0))
        assert after.pointers == (("workspace", y), ("out", first * OUT_ROW * 2))
        assert main.scalars == 1 and parameters(main).rows == count
        assert main.spec == found.steps[2].spec


@pytest.mark.parametrize("epilogue", [(), EPILOGUE], ids=len)
@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_every_block_is_as_long_as_the_struct_of_its_source(dtype, precision, epilogue):
    given = factor(2, 40, 24, 16, rows=1001, dtype=dtype, precision=precision)
    for step in lowered(given, epilogue).steps:
        size = len(block(step, ADDRESSES))
        assert size == parameter_bytes(step) == ctypes.sizeof(parameters(step))


# Numbers, by the text of the kernel that transposes and the maps of the one that multiplies.


def evaluated(code, text, **values):
    """An expression of the source, or a condition that takes all of several, for all threads at
    once."""
    terms = (text.run(f"int term = {term};", **values).term for term in code.split(" && "))
    return functools.reduce(operator.and_, terms)


def words(text, read, chunks):
    """The tile of words that threads put chunks into, (threads, chunks, CHUNK)."""
    place = re.search(r"tile\[(.*?)\] = read\[i\]\.word\[e\]", text.body("turn(const Words"))[1]
    line = text.run("constexpr int LINE = TILE + 1;").LINE
    tile = np.full(text["TILE"] * line, 10**12)
    for e in range(text["CHUNK"]):
        tile[evaluated(place, text, index=read.index, e=e, LINE=line)] = chunks[e]
    return tile, {"LINE": line}


def through_words(text, read, chunks):
    """What threads hold where it has gone through a tile of words."""
    body = text.body("turn(const Words")
    taken = re.search(r"line\.word\[e\] = tile\[(.*?)\];", body)[1]
    code = body[body.rindex("u32 index") : body.index("Words line")]
    tile, sizes = words(text, read, chunks)
    write = text.run(code, threadIdx=SimpleNamespace(x=THREAD), i=np.arange(text["CHUNKS"])[None])
    found = [
        tile[evaluated(taken, text, n=write.n, f=write.f, e=e, **sizes)]
        for e in range(text["CHUNK"])
    ]
    return write.n, write.f, found


def matrices(text, read, chunks):
    """The tile that ldmatrix reads, and where its chunks begin."""
    assert "tile + place_of(index / ACROSS, index % ACROSS)" in text.body("turn(const Words")
    place = re.search(r"return (.*?);", text.body("place_of(u32 n"))[1]

    def begin(n, chunk):
        return evaluated(place, text, n=n, chunk=chunk) // 2

    tile = np.full(text["TILE"] ** 2, 10**12)
    first = begin(read.index // text["ACROSS"], read.index % text["ACROSS"])
    for e in range(8):
        tile[first + e] = chunks[e]
    return tile, begin


def through_matrices(text, read, chunks):
    """The same by ldmatrix, which gives lane l column l / 4 of rows 2 (l % 4) and the next of four
    matrices, whose rows begin where lanes 8 m + r say."""
    body = text.body("turn(const Words")
    assert "load_matrices<true>(x.word, base + place_of(half * 32 + line, warp))" in body
    tile, begin = matrices(text, read, chunks)
    code = body[body.rindex("u32 lane = ") : body.index("u32 base")]
    code += re.search(r"u32 line = .*?;", body)[0]
    at = text.run(code, threadIdx=SimpleNamespace(x=THREAD))
    half = np.arange(2)[None]
    row = begin(half * 32 + at.line, at.warp)
    banks = (row.reshape(-1, 4, 8, 2) * 2 // 16 % 8).transpose(0, 1, 3, 2)
    assert all(len(set(each)) == 8 for each in banks.reshape(-1, 8).tolist())
    n = text.run(
        body[body.rindex("u32 n = ") : body.index("load_matrices")], half=half, lane=at.lane
    ).n
    found = []
    for e in range(8):
        source = at.warp * 32 + e // 2 * 8 + at.lane % 4 * 2 + e % 2
        found.append(tile[row[source[:, 0]] + at.lane // 4])
    return n, at.f + 0 * half, found


def number_by_number(text, read, chunks, itemsize):
    """What threads write of a result that has no whole 16 bytes: numbers in place of chunks."""
    body, turn = text.body("store_numbers(const"), text.body("turn(const Words")
    first = body[body.index("u32 lane") : body.index("for (int i")]
    at = text.run(first, threadIdx=SimpleNamespace(x=THREAD))
    count = evaluated(re.search(r"i < (.*?);", body)[1], text)
    code = body[body.index("u32 n = ") : body.index("if (row")]
    write = text.run(code, lane=at.lane, warp=at.warp, i=np.arange(count)[None])
    if itemsize == 2:
        assert "(tile + place_of(n, f / CHUNK))[f % CHUNK]" in turn
        tile, begin = matrices(text, read, chunks)
        chunk = text["CHUNK"]
        return write.n, write.f, [tile[begin(write.n, write.f // chunk) + write.f % chunk]]
    taken = re.search(r"__uint_as_float\(tile\[(.*?)\]\)", turn)[1]
    tile, sizes = words(text, read, chunks)
    return write.n, write.f, [tile[evaluated(taken, text, n=write.n, f=write.f, **sizes)]]


THREAD = np.arange(256)[:, None]


def transpose(step, memory, itemsize):
    """What one launch of transpose.cuh reads and writes."""
    text, p = text_of(step.spec.source), parameters(step)
    body = text.body("kronecker_sparse_transpose(const")
    places = body[body.index("u32 row = ") : body.index("Words x")]
    reads = body[body.index("u32 index") : body.index("const InputT* from")]
    source = re.search(r"from = p\.in \+ (.*?);", body)[1]
    wide = re.search(r"if \((p\.vectors .*?)\) \{", body)[1]
    assert "} else if (n < p.rows) {" in body and "if (f + e < p.columns) x[i]" in body
    assert re.search(r"store_chunk\(\w+, p, row \+ n, column \+ f\)", text.body("turn(const Words"))
    stored = {
        True: re.search(
            r"if \((.*?)\) store_vector\(p\.out \+ (.*?), x\.value\)",
            text.body("store_chunk(const"),
        ).groups(),
        False: re.search(
            r"if \((.*?)\)\s+p\.out\[(.*?)\] = number", text.body("store_numbers(const")
        ).groups(),
    }
    chunk, through = text["CHUNK"], through_matrices if itemsize == 2 else through_words
    assert len(THREAD) == text["THREADS"]
    per_thread = {"threadIdx": SimpleNamespace(x=THREAD), "i": np.arange(text["CHUNKS"])[None]}
    (origin, begin), (target, to) = step.pointers
    for index in range(step.grid[0]):
        at = text.run(places, p=p, blockIdx=SimpleNamespace(x=index))
        own = {"row": at.row, "column": at.column, "p": p}
        read = text.run(reads, **own, **per_thread)
        place = begin // itemsize + evaluated(source, text, p=p, n=read.n, f=read.f)
        loads = evaluated(wide, text, p=p, n=read.n, f=read.f)
        assert not (loads & (place * itemsize % 16 != 0)).any()
        chunks = []
        for e in range(chunk):
            inside = (read.n < p.rows) & (read.f + e < p.columns)
            assert (inside | ~loads).all()
            found = memory[origin][np.where(inside, place + e, 0)]
            chunks.append(np.where(inside, found, 0))
        if p.whole:
            n, f, lines = through(text, read, chunks)
        else:
            n, f, lines = number_by_number(text, read, chunks, itemsize)
        own = {"p": p, "row": at.row, "column": at.column}
        condition, target_place = stored[bool(p.whole)]
        inner = {"n": n, "f": f} if not p.whole else {"n": at.row + n, "f": at.column + f}
        taken = evaluated(condition, text, **own, **inner)
        place = to // itemsize + evaluated(target_place, text, **own, **inner)
        assert not p.whole or (place[taken] * itemsize % 16 == 0).all()
        for e in range(len(lines)):
            memory[target][place[taken] + e] = lines[e][taken]


def operand(step, number, memory, itemsize):
    """An operand of a product by its map: (blocks, columns or depth, lanes, rows)."""
    name, begin = step.pointers[number]
    made = step.maps[number]
    steps = (itemsize, *made.strides)
    reach = sum((size - 1) * by for size, by in zip(made.sizes, steps, strict=True))
    whole = memory[name][begin // itemsize :][: reach // itemsize + 1]
    by = [8 * (each // itemsize) for each in reversed(steps)]
    return np.lib.stride_tricks.as_strided(whole, tuple(reversed(made.sizes)), by)


SMALL = {
    "whole": factor(2, 10, 6, 8, rows=160),
    "an odd batch": factor(2, 10, 6, 8, rows=203),
    "two rows": factor(2, 10, 6, 8, rows=2),
    "by x": by_x(2, 10, 6, 8, rows=203),
    "float32": factor(2, 10, 6, 4, rows=203, dtype="float32"),
    "d = 24": factor(1, 5, 3, 24, rows=77),
    "rows apart": factor(
        2, 10, 6, 8, rows=203, left=Layout(48, 1, 128, 8), out=OutLayout(80, 1, 200, 8)
    ),
    "odd sizes": factor(3, 5, 7, 3, rows=77),
    "odd sizes of float32": factor(3, 5, 7, 3, rows=77, dtype="float32"),
    "a misaligned result": factor(2, 10, 6, 8, rows=203, out=OutLayout(80, 1, 160, 8, 2)),
    "odd rows apart": factor(
        2, 10, 6, 8, rows=203, left=Layout(48, 1, 99, 8), out=OutLayout(80, 1, 163, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("workspace", (2**30, 2**17, 2**16))
@pytest.mark.parametrize("name", SMALL)
def test_every_number_of_the_result_is_written_and_no_other(name, workspace, monkeypatch):
    monkeypatch.setattr(transposed, "WORKSPACE", workspace)
    given = SMALL[name]
    itemsize = ITEMSIZE[given.dtype]
    found = lowered(given)
    features, outputs = transposed.feature_counts(given)
    a, d, rows, b, c = given[:5]
    wide, apart = max(given.left.line, features), max(given.out.row, outputs)
    generator = np.random.default_rng(0)
    x, w = generator.integers(-9, 9, (rows, features)), generator.integers(-9, 9, (a, d, b, c))
    memory = {
        "left": np.full((rows, wide), 10**12),
        "out": np.full((rows, apart), -1),
        "workspace": np.full(found.workspace // itemsize, 10**12),
    }
    memory["left"][:, :features] = x
    memory = {place: numbers.reshape(-1) for place, numbers in memory.items()}
    for step in found.steps[1:]:
        if step.maps:
            left, out = (operand(step, number, memory, itemsize) for number in range(2))
            out[:] = np.einsum("ikln,iljk->ijln", left.reshape(a, c, d, -1), w).reshape(out.shape)
        else:
            transpose(step, memory, itemsize)
    wanted = np.einsum("nikl,iljk->nijl", x.reshape(rows, a, c, d), w)
    written = memory["out"].reshape(rows, apart)
    assert (written[:, :outputs] == wanted.reshape(rows, outputs)).all()
    assert (written[:, outputs:] == -1).all()


def test_much_scratch_wants_a_clear_gain():
    """A factor (4, 40, 40, 6) is estimated to be 6 to 10 % faster by way of batch last, where 1500
    rows take 11.5 MB of it, 6000 take 46 MB and 12000 take 92 MB. A million rows of (2, 3, 5, 3)
    would take 192 MB."""

    def kind(rows, depth, columns, lanes, blocks=2):
        left = Layout(depth * lanes, 1, blocks * depth * lanes, lanes, 16)
        right = Layout(columns * depth * lanes, 1, depth * lanes, lanes, 16)
        out = OutLayout(columns * lanes, 1, blocks * columns * lanes, lanes, 16)
        given = Problem(blocks, lanes, rows, columns, depth, left, right, out, "float32", "fp32")
        return lowering.candidates(given, "sm_90a")[0]["kind"]

    assert kind(1500, 40, 40, 6, blocks=4) == "transposed"
    assert kind(6000, 40, 40, 6, blocks=4) == kind(12000, 40, 40, 6, blocks=4) == "portable"
    assert kind(1_000_000, 5, 3, 3) == "portable"
    assert kind(2_000, 68, 70, 23) == "transposed"  # by far
