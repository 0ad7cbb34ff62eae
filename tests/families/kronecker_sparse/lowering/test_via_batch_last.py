"""Lowering of products of large factors by way of batch last: which go there, where x and result
lie in the workspace, and what becomes of each number where the kernel that transposes them runs on
the host."""

import itertools

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.lanes import via_batch_last as transposed
from kernlib.families.kronecker_sparse.kernels.lanes.via_batch_last import Transposed
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout
from kernlib.lowering.kernel import Gpu
from tests.families.kronecker_sparse.lowering.cases import (
    ARCH,
    ITEMSIZE,
    KINDS,
    PROCESSORS,
    batch_last,
    by_x,
    entries,
    factor,
    kinds_of,
    launch,
    parameters,
    weight_gradient,
)
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.kernels import stem

EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())


def lowered(given, epilogue=(), processors=PROCESSORS):
    (choice, *_), gpu = Transposed().choices(given, ARCH), Gpu(ARCH, processors)
    return Transposed().launch(epilogue, given, gpu, choice)


# Which problems.

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
    assert "transposed" in kinds_of(TAKEN[name])
    assert entries(lowered(TAKEN[name]))[1:4] == ["transpose", "hopper", "transpose"]


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left_to_other_kinds(name):
    assert "transposed" not in kinds_of(LEFT[name])


def test_a_batch_whose_last_slice_is_a_deep_product_is_left(monkeypatch):
    monkeypatch.setattr(transposed, "WORKSPACE", 384 * 2 * 16 * (1100 + 16))
    for rows, last, taken in ((1060, 292, True), (1000, 232, False)):
        given = factor(1, 16, 1100, 16, rows=rows)
        assert transposed.slices_of(given, 384)[-1][1] == last
        assert transposed.slice_rows(given) == 384
        assert ("transposed" in kinds_of(given)) == taken and "interleaved" in kinds_of(given)


def test_choices_are_those_of_the_product_batch_last():
    last = batch_last(lanes=64, blocks=1, columns=768, depth=192)
    known = [c for c in lowering.candidates(last, ARCH) if c["kind"] == "hopper"]
    own = [c for c in lowering.candidates(LARGE, ARCH) if c["kind"] == "transposed"]
    assert [{**choice, "kind": "hopper"} for choice in own] == known and len(own) > 1
    for choice in own:
        named = {name: str(value) for name, value in choice.items()}
        found = lowering.lower((), LARGE, ARCH, PROCESSORS, named)
        assert f"128x{choice['columns']} batch_last" in found.steps[2].spec.description


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
    assert "transposed" not in kinds_of(wide) and "interleaved" in kinds_of(wide)


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
    (choice, *_), gpu = Transposed().choices(given, ARCH), Gpu(ARCH, PROCESSORS)
    part = Hopper().launch((), transposed.part_of(given, rows), gpu, choice)
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


# Numbers, by the kernel that transposes and the maps of the one that multiplies.

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


@pytest.fixture
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


def operand(step, number, memory):
    """An operand of a product by its map: (blocks, columns or depth, lanes, rows)."""
    name, begin = step.pointers[number]
    made, whole = step.maps[number], memory[name]
    strides = (1, *(stride // whole.itemsize for stride in made.strides))
    return whole.as_strided(made.sizes[::-1], strides[::-1], begin // whole.itemsize)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("workspace", (2**30, 2**17, 2**16))
@pytest.mark.parametrize("name", SMALL)
def test_every_number_of_the_result_is_written_and_no_other(
    name, workspace, emulator, monkeypatch, seed
):
    monkeypatch.setattr(transposed, "WORKSPACE", workspace)
    given = SMALL[name]
    found, dtype = lowered(given), getattr(torch, given.dtype)
    features, outputs = transposed.feature_counts(given)
    a, d, rows, b, c = given[:5]
    wide, apart = max(given.left.line, features), max(given.out.row, outputs)
    x, w = torch.randint(-9, 9, (rows, features)), torch.randint(-9, 9, (a, d, b, c))
    memory = {
        "left": torch.full((rows, wide), torch.nan, dtype=dtype),
        "out": torch.full((rows, apart), -1, dtype=dtype),
        "workspace": torch.full((found.workspace // dtype.itemsize,), torch.nan, dtype=dtype),
    }
    memory["left"][:, :features] = x
    for step in found.steps[1:]:
        if step.maps:
            left, out = (operand(step, number, memory) for number in range(2))
            left = left.double().reshape(a, c, d, -1)
            out.copy_(torch.einsum("ikln,iljk->ijln", left, w.double()).reshape(out.shape))
        else:
            launch(emulator, step, memory)
    wanted = torch.einsum("nikl,iljk->nijl", x.reshape(rows, a, c, d), w)
    assert torch.equal(memory["out"][:, :outputs].long(), wanted.reshape(rows, outputs))
    assert (memory["out"][:, outputs:] == -1).all()
