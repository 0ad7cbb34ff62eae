"""Which kernel of Hopper's a product takes: the columns and the slots of its tiles."""

from __future__ import annotations

import pytest

from kernlib.families.blocksparse.lowering import choose, hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Spmm, Values
from kernlib.lowering.kernel import Gpu

ARCH, COUNT = hopper.ARCH, 132


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
    kernels = choose.kernels("sdd" if isinstance(problem, Sdd) else "spmm")
    hopper = next(kernel for kernel in kernels if kernel.name == "hopper")
    (value,) = hopper.default(problem, Gpu(ARCH, count)).values()
    return value


def test_few_columns_take_tiles_that_hold_them():
    """16 heads of 4096 lines: more tiles than multiprocessors with any."""
    widths = {24: 64, 64: 64, 72: 128, 128: 128, 136: 256, 256: 256, 264: 256, 4096: 256}
    assert {n: taken(spmm(4096, n, heads=16)) for n in widths} == widths


def test_so_few_that_bytes_decide_are_not_for_wgmma():
    """Nor are those whose tiles are few, on many multiprocessors: parts of sums are."""
    kinds = {1: "decode", 16: "portable", 24: "portable", 64: "portable", 1024: "hopper"}
    for columns, kind in kinds.items():
        problem = spmm(4096, columns)
        found = choose.default(problem, 132, ARCH)
        assert found["kind"] == kind
    assert taken(spmm(4096, 64)) == 64
    assert choose.default(spmm(4096, 64), 132, ARCH) == {
        "kind": "portable",
        "columns": 32,
        "parts": 2,
    }


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
