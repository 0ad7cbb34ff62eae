"""Products of bitmap matrices with many vectors: which tiles, how they are cut, and what fits."""

import struct

import pytest

import kernlib as kl
from kernlib.families.sparse.kernels import pack
from kernlib.families.sparse.kernels.bitmap import many as kernels
from kernlib.families.sparse.kernels.bitmap.many import BitmapMany, BitmapPairs
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import Problem, Scope
from kernlib.jit import targets
from tests.support.compiled_kernels import compiled
from tests.support.kernels import stem
from tests.support.speeds import one_of_each, slow_but

ARCH, MULTIPROCESSORS = "sm_90a", 132
EPILOGUE = (kl.Bias(), kl.Scale(), kl.Gelu())
HALF = ("float16", "bfloat16")
LARGEST = (512, 4880, 8704)  # of a chunk without values, of half of them, and of all
SHAPES = ((1, 1), (17, 300), (4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008))
COLUMNS = (9, 16, 17, 64, 65, 128, 129, 512, 1024)


def problem(rows=4096, cols=4096, columns=64, largest=4880, dtype="float16", strides=None):
    pitch, facts = -(-cols // 8) * 8, (("largest", largest),)
    return Problem(rows, cols, columns, dtype, pitch, False, strides or (rows, 1), facts, "bitmap")


def fixed(step):
    fields = BitmapMany.fixed
    values = struct.unpack(fields.format, step.fixed[: fields.size])
    return dict(zip(fields.names, values, strict=True))


def units(main):
    """What each CTA of a launch computes, as bitmap/many.cuh works it out: row tile, tile of
    vectors, and its chunks."""
    f = fixed(main)
    for unit in range(main.grid[0]):
        tile, first, last = unit, 0, f["kchunks"]
        if unit >= f["whole_tiles"]:
            tile, part = divmod(unit - f["whole_tiles"], f["parts"])
            tile += f["whole_tiles"]
            first = part * f["part_chunks"] + min(part, f["longer_parts"])
            last = first + f["part_chunks"] + (part < f["longer_parts"])
        if tile // f["n_tiles"] < f["row_tiles"]:
            yield *divmod(tile, f["n_tiles"]), first, last


def main_of(given, epilogue=()):
    return choose.lower(epilogue, given, ARCH, MULTIPROCESSORS).steps[1]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_chunk_of_each_tile_is_taken_once(shape, columns):
    for largest in LARGEST:
        given = problem(*shape, columns, largest)
        main = main_of(given)
        f, tile = fixed(main), kernels.tile_of(given, ARCH, MULTIPROCESSORS)
        assert f["row_tiles"] * tile.rows >= shape[0] > (f["row_tiles"] - 1) * tile.rows
        assert f["padded"] == f["n_tiles"] * tile.columns >= columns
        chunks = sorted(
            (row, n, k) for row, n, first, last in units(main) for k in range(first, last)
        )
        tiles = [(row, n) for row in range(f["row_tiles"]) for n in range(f["n_tiles"])]
        assert chunks == [(*at, k) for at in tiles for k in range(f["kchunks"])]


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_parts_of_a_pair_are_one_cluster(columns):
    for shape in SHAPES:
        main = main_of(problem(*shape, columns))
        if "bool PAIRS = true" in main.spec.source:
            assert main.grid[0] % 2 == 0 and fixed(main)["parts"] in (1, 2)
            assert fixed(main)["parts"] == 1 or fixed(main)["whole_tiles"] % 2 == 0


def test_parts_meet_behind_the_packed_vectors():
    given = problem(8192, 28672, 40, strides=(10_000, 1))
    packed, main, last = choose.lower(EPILOGUE, given, ARCH, MULTIPROCESSORS).steps
    f = fixed(main)
    assert f["parts"] > 1 and (f["first_cut_row"], f["cut_rows"]) == (0, 8192)
    begin = main.pointers[4][1]
    assert packed.pointers[1] == main.pointers[2] == ("workspace", 0)
    assert main.pointers[4] == last.pointers[0] == ("workspace", begin)
    assert begin >= pack.nbytes(given, f["padded"]) and begin % 1024 == 0
    lowered = choose.lower(EPILOGUE, given, ARCH, MULTIPROCESSORS)
    assert lowered.workspace == begin + 4 * f["parts"] * 40 * 8192
    assert not packed.overlaps and main.overlaps and last.overlaps
    early = choose.lower(EPILOGUE, given._replace(frozen=True), ARCH, MULTIPROCESSORS).steps
    assert early == (packed._replace(overlaps=True), main, last)


def test_the_sums_of_cut_rows_go_where_these_begin():
    """Behind whole tiles: of the result, and of vectors of the epilogue."""
    tile = kernels.NARROW[2]
    given = problem(tile.rows * 150, 8192, tile.columns, strides=(1, 64))
    lowered = choose.lower(EPILOGUE, given, ARCH, MULTIPROCESSORS)
    first = fixed(lowered.steps[1])["first_cut_row"]
    assert 0 < first < given.rows
    pointers = dict(lowered.steps[2].pointers)
    assert pointers["out"] == 2 * 64 * first and pointers["vector0"] == 2 * first


@pytest.mark.parametrize("largest", LARGEST)
def test_rings_fit_shared_memory(largest):
    for columns in COLUMNS:
        given = problem(columns=columns, largest=largest)
        main, tile = main_of(given), kernels.tile_of(given, ARCH)
        f = fixed(main)
        assert 2 <= f["slots"] <= kernels.MAX_SLOTS
        assert f["slot_bytes"] >= largest + kernels.SLOT_TAIL and f["slot_bytes"] % 128 == 0
        ring = f["slots"] * f["slot_bytes"] * tile.warps
        assert tile.fixed_bytes + ring <= main.spec.shared_bytes == targets.SHARED_BYTES[ARCH]


def test_what_it_takes():
    narrow, wide = BitmapMany(), BitmapPairs()
    assert narrow.takes(problem(columns=9), ARCH) and wide.takes(problem(columns=1024), ARCH)
    assert not wide.takes(problem(columns=9), ARCH) and not narrow.takes(problem(columns=99), ARCH)
    for given in (
        problem(columns=8), problem(columns=1025), problem(0), problem(cols=0),
        problem(dtype="float32"), problem(2**31),
    ):  # fmt: skip
        assert not narrow.takes(given, ARCH) and not wide.takes(given, ARCH)
    for arch in targets.SHARED_BYTES:
        assert narrow.takes(problem(), arch) == (arch == ARCH)
        assert choose.takes(problem(columns=64), arch) == (arch == ARCH)


def cases():
    specs = [
        spec
        for kernel in (BitmapMany(), BitmapPairs())
        for epilogue, dtypes in ((EPILOGUE, HALF), ((), HALF[:1]))
        for spec in kernel.specs(epilogue, Scope("bitmap", dtypes, ARCH), ARCH)
    ]
    return {spec.description: (spec, ARCH) for spec in specs}


CASES = cases()
FAST = one_of_each(lambda case: stem(case[0]), CASES)


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_every_variant_compiles_without_spills(name):
    kernel = compiled(*CASES[name])
    assert not kernel.spilled and not kernel.serialized
