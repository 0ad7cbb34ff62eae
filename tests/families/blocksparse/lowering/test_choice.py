"""Which kernel of Hopper's a product takes: the columns and the slots of its tiles."""

from __future__ import annotations

import itertools

import pytest

import kernlib as kl
from kernlib.families.blocksparse.lowering import choose, hopper, sampled_hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Spmm, Values
from kernlib.families.blocksparse.lowering.rounds import fewest_rounds

ARCH, COUNT = hopper.ARCH, 132
HALVES = ("float16", "bfloat16")


def spmm(lines: int, columns: int, heads: int = 1, block: int = 64, **changes) -> Spmm:
    """Of a matrix of 4096 columns a head."""
    blocks = Blocks(block, block, lines // block, 4096 // block, heads, 1000)
    dense, out = (Dense(0, n * columns, columns, 1) for n in (4096, lines))
    values = Values(0, block * block, block, 1)
    made = Spmm("float16", "fp32", blocks, 1, columns, False, values, dense, out)
    return made._replace(**changes)


def sdd(capacity: int, block: tuple[int, int], batch: int = 1, **changes) -> Sdd:
    blocks = Blocks(*block, 4096 // block[0], 4096 // block[1], 1, capacity)
    values = Values(capacity * block[0] * block[1], block[0] * block[1], block[1], 1)
    a, b = Dense(0, 0, 1024, 1), Dense(0, 0, 4096, 1)
    return Sdd("float16", "fp32", blocks, batch, 1024, a, b, values)._replace(**changes)


def taken(problem: Spmm | Sdd, count: int = COUNT) -> int:
    known = [each for each in choose.candidates(problem, ARCH) if each["kind"] == "hopper"]
    choice = choose.default(problem, known, count)
    return next(value for knob, value in choice.items() if knob != "kind")


def test_the_cheapest_rounds_are_taken():
    known = [{"n": n} for n in (4, 2, 1)]

    def tiles(choice):
        return 100 // choice["n"], choice["n"] + 1

    assert fewest_rounds(known, tiles, 132) == {"n": 1}  # 5, 3 and 2, each in one round
    assert fewest_rounds(known, tiles, 60) == {"n": 2}  # 5, 3 and 2 * 2
    assert fewest_rounds(known, tiles, 10) == {"n": 4}  # 3 * 5, 5 * 3, 10 * 2: the first of equals


def test_few_columns_take_tiles_that_hold_them():
    """16 heads of 4096 lines: more tiles than multiprocessors with any."""
    widths = {24: 64, 64: 64, 72: 128, 128: 128, 136: 256, 256: 256, 264: 256, 4096: 256}
    assert {n: taken(spmm(4096, n, heads=16)) for n in widths} == widths


def test_so_few_that_bytes_decide_are_not_for_wgmma():
    """Nor are those whose tiles are few, on many multiprocessors: parts of sums are."""
    kinds = {1: "decode", 16: "portable", 24: "portable", 64: "portable", 1024: "hopper"}
    for columns, kind in kinds.items():
        problem = spmm(4096, columns)
        found = choose.default(problem, choose.candidates(problem, ARCH), 132)
        assert found["kind"] == kind
    assert taken(spmm(4096, 64)) == 64
    assert choose.default(spmm(4096, 64), choose.candidates(spmm(4096, 64), ARCH), 132) == {
        "kind": "portable",
        "columns": 32,
        "parts": 2,
    }


def test_candidates_are_no_wider_than_the_columns_ask_for():
    known = {8: [64], 64: [64], 72: [128, 64], 128: [128, 64], 136: [256, 128, 64]}
    for columns, widths in known.items():
        found = choose.candidates(spmm(4096, columns), ARCH)
        own = [choice["columns"] for choice in found if choice["kind"] == hopper.KIND]
        assert own == widths
        assert found[0] == {"kind": "hopper", "columns": widths[0]}


def test_few_tiles_are_narrower_on_more_multiprocessors():
    """48, 32 and 24 KB a step; of n tiles in the widest 2 n and 4 n in the others."""
    assert taken(spmm(128 * 33, 256)) == 64  # 33, 66, 132 tiles: one round each
    assert taken(spmm(128 * 66, 256)) == 128  # 66, 132, 264: the last in two
    assert taken(spmm(128 * 67, 256)) == 256  # 67, 134, 268: one, two, three
    assert taken(spmm(128 * 132, 256)) == 256
    assert taken(spmm(128 * 33, 256), count=33) == 256


def test_tiles_that_no_counter_holds_are_no_candidates():
    many = spmm(128, 2**38)
    assert [choice["columns"] for choice in hopper.candidates(many, ARCH)] == [256]
    assert hopper.default(many, hopper.candidates(many, ARCH), COUNT) == {"columns": 256}


@pytest.mark.parametrize(
    "block, slots",
    [
        # Of 102 blocks pairs are 51 tiles, of three quarters of what two single ones take.
        ((128, 128), {1: 1, 102: 1, 132: 1, 133: 2, 264: 2, 1000: 2}),
        ((64, 128), {132: 1, 133: 2, 264: 2}),
        ((128, 64), {132: 1, 133: 2, 1000: 2}),
        # 40, 24 and 16 KB for four, two and one of them.
        ((64, 64), {132: 1, 133: 2, 264: 2, 265: 4, 528: 4, 10000: 4}),
    ],
)
def test_few_blocks_take_tiles_of_few_slots(block, slots):
    assert {n: taken(sdd(n, block)) for n in slots} == slots
    assert taken(sdd(102, block, batch=20)) == max(slots.values())


def spec_of(problem: Spmm | Sdd, choice=None, epilogue=(), count: int = COUNT):
    return choose.lower(epilogue, problem, ARCH, count, choice).steps[-1].spec


def test_a_choice_is_taken_as_it_is_named():
    problem = spmm(4096, 4096)
    assert "128x64" in spec_of(problem, {"kind": "hopper", "columns": "64"}).description.split()
    assert "128x256" in spec_of(problem, {"kind": "hopper", "columns": 96}).description.split()
    problem = sdd(1000, (64, 64))
    assert "2slots" in spec_of(problem, {"kind": "hopper", "slots": 2}).description.split()
    assert "4slots" in spec_of(problem, {"kind": "hopper", "slots": 3}).description.split()


def test_the_parameters_are_those_of_the_tiles():
    problem = spmm(4096, 4096)
    for width in hopper.WIDTHS:
        tiles, groups, across = hopper.numbers(problem, COUNT, width)[:3]
        assert (groups, across, tiles) == (32, 4096 // width, 32 * 4096 // width)
    few = spmm(4096, 512)  # 64 tiles of 256 columns, 256 of 64
    assert [hopper.is_ordered(few, COUNT, width) for width in hopper.WIDTHS] == [0, 0, 1]


@pytest.mark.parametrize("epilogue", [(), (kl.Bias(), kl.Gelu())], ids=["none", "bias"])
def test_variants_are_all_that_a_product_takes(epilogue):
    """Those of the order of tiles too."""
    columns, heads = (8, 72, 264, 4096), (1, 16)
    for block, transposed in itertools.product((16, 32, 64, 128), (False, True)):
        known = choose.variants(epilogue, "dsd", (block, block), HALVES, ARCH)
        assert len(set(known)) == len(known)
        for n, h in itertools.product(columns, heads):
            problem = spmm(4096, n, h, block, transposed=transposed)
            for choice in choose.candidates(problem, ARCH):
                lowered = choose.lower(epilogue, problem, ARCH, COUNT, choice)
                assert set(lowered.specs) <= set(known)
            assert set(choose.specs(epilogue, problem, ARCH)) <= set(known)


@pytest.mark.parametrize("block", [*itertools.product((64, 128), (64, 128))], ids=str)
def test_variants_are_all_that_a_sampled_product_takes(block):
    known = choose.variants((), "sdd", block, HALVES, ARCH)
    assert len(set(known)) == len(known)
    for capacity in (1, 132, 200, 1000):
        problem = sdd(capacity, block)
        choices, whole = choose.candidates(problem, ARCH), []
        for choice in choices:
            specs = choose.lower((), problem, ARCH, COUNT, choice).specs
            assert set(specs) <= set(known)
            whole += specs if "parts" not in choice else []
        assert len(set(whole)) == len(whole) >= 2
        assert set(choose.specs((), problem, ARCH)) <= set(known)


def test_shared_memory_has_room_for_stages():
    for width in hopper.WIDTHS:
        stage = hopper.stage_bytes(width)
        assert hopper.STAGES_BYTES // stage == {256: 4, 128: 6, 64: 8}[width]
        assert hopper.shared_bytes(stage) <= 227 * 1024
    specs = sampled_hopper.variants((), (64, 64), HALVES, ARCH)
    assert max(spec.shared_bytes for spec in specs) <= 227 * 1024
