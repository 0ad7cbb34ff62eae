"""Hopper's kernel that multiplies whole tiles and keeps their stored blocks: run by threads of the
host, which problems it takes and when it pays, and what NVRTC makes of it."""

from __future__ import annotations

import itertools

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.lowering import choose, hopper, stationary, tiles
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div
from tests.families.blocksparse.emulated import GATES, Case, error
from tests.families.blocksparse.squares import ARCH, HALVES, Product, problem
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.kernels import only
from tests.support.speeds import slow_but

EPILOGUES = {"none": (), "gelu": (kl.Scale(), kl.Gelu())}

# A product, whose columns are its depth, and how a and b lie.
CASES = {
    "16": (Case("float16", (16, 16), (9, 21), 0.3, 2, 2, 200), "rows", "rows"),
    "16, deeper": (Case("bfloat16", (16, 16), (11, 18), 0.3, 1, 1, 456), "columns", "columns"),
    "16, many tiles": (Case("float16", (16, 16), (19, 70), 0.2, 1, 1, 72), "rows", "columns"),
    "32": (Case("bfloat16", (32, 32), (9, 11), 0.4, 2, 1, 136), "rows", "columns"),
    "32, turned": (Case("float16", (32, 32), (3, 18), 0.3, 1, 2, 320), "columns", "rows"),
    "64": (Case("float16", (64, 64), (5, 9), 0.4, 1, 2, 264), "rows", "rows"),
    "64, turned": (Case("bfloat16", (64, 64), (3, 6), 0.5, 1, 1, 128), "columns", "rows"),
    "odd depth": (Case("float16", (16, 16), (5, 9), 0.4, 2, 1, 129), "columns", "rows"),
    "depth 8": (Case("float16", (32, 32), (5, 9), 0.4, 1, 1, 8), "rows", "columns"),
    "empty": (Case("float16", (16, 16), (5, 9), 0.0, 2, 2, 192), "rows", "rows"),
    "full": (Case("float16", (16, 16), (9, 20), 1.0, 1, 1, 192), "rows", "rows"),
    "sparse": (Case("float16", (32, 32), (24, 24), 0.01, 2, 1, 136), "rows", "rows"),
}
FAST = ("16", "32, turned", "64", "odd depth", "empty")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(kernels_of(tmp_path_factory))


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_products_are_right(name, emulator, seed):
    """Also in slots that hold no block, of which there are some."""
    case, *orders = CASES[name]
    made = Product(case, *orders)
    assert error(made.run(tiles, emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("block", stationary.SIZES)
@pytest.mark.parametrize("orders", [*itertools.product(("rows", "columns"), repeat=2)])
def test_both_orders_of_both_operands(orders, block, emulator, seed):
    case = Case("bfloat16", (block, block), (192 // block, 320 // block), 0.3, 2, 1, 136)
    made = Product(case, *orders)
    assert error(made.run(tiles, emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@pytest.mark.parametrize("block", slow_but((16,), stationary.SIZES))
def test_an_epilogue(block, emulator, seed):
    """Zeros stay zeros in slots that hold no block."""
    made = Product(Case("float16", (block, block), (192 // block, 5), 0.5, 2, 2, 136))
    wanted = torch.nn.functional.gelu(1.5 * made.wanted())
    found = made.run(tiles, emulator, EPILOGUES["gelu"], (1.5,))
    assert error(found, wanted) <= 2 * GATES["float16"]


# Arithmetic of launches, and choices.


def test_what_it_takes():
    def takes(given: Sdd, arch: str = ARCH) -> bool:
        return tiles.takes(given, arch)

    plain = problem(depth=4096)
    assert takes(plain) and not takes(plain, "sm_90") and not takes(plain, "sm_80")
    assert all(takes(problem(block=block, depth=8)) for block in stationary.SIZES)
    assert not takes(problem(block=128)) and not takes(problem(depth=0))
    assert not takes(plain._replace(dtype="float32"))
    assert not takes(plain._replace(a=plain.a._replace(line=4100)))
    assert not takes(plain._replace(b=Dense(0, 0, 8192, 2)))
    assert not takes(plain._replace(values=plain.values._replace(slot=512)))
    assert not takes(plain._replace(summands=(plain.values,)))


@pytest.mark.parametrize("count", [1, 78, 132])
@pytest.mark.parametrize("n, heads", [(128, 1), (528, 3), (4096, 1), (8192, 5)])
def test_tiles_cover_all(n, heads, count):
    given = problem(n, heads=heads, depth=200)
    count_of, down, across, steps = tiles.numbers(given)[1:5]
    assert (down - 1) * 128 < n <= down * 128 and (across - 1) * 256 < n <= across * 256
    assert count_of == down * across * heads and steps == ceil_div(200, 64)
    grid = only(tiles.lower((), given, ARCH, count)).grid
    assert grid == (min(count_of, count), 1)


def kind(given: Sdd, count: int = 132) -> str:
    return choose.default(given, choose.candidates(given, ARCH), count)["kind"]


def test_it_is_taken_where_it_pays():
    others = {16: ("sampled", 0.2, 0.1), 32: ("sampled", 0.25, 0.15), 64: ("hopper", 0.4, 0.25)}
    for block, (other, enough, few) in others.items():
        assert kind(problem(block=block, density=enough, depth=4096)) == "tiles"
        for depth in (256, 1024, 4096):
            assert kind(problem(block=block, density=few, depth=depth)) == other
        # Two tiles are two multiprocessors' work, and few blocks share sums.
        assert kind(problem(256, block=block, depth=4096)) == "sampled"
    assert kind(problem(depth=64)) == "stationary"
    assert kind(problem(block=128, depth=4096)) == "hopper"


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("block", (16, 32, 64, 128))
def test_variants_are_all_that_a_problem_takes(block, epilogue):
    epilogue = EPILOGUES[epilogue]
    known = choose.variants(epilogue, "sdd", (block, block), HALVES, ARCH)
    assert len(set(known)) == len(known)
    for dtype, turned in itertools.product(HALVES, (False, True)):
        given = problem(block=block, depth=4096, dtype=dtype)
        if turned:
            given = given._replace(a=Dense(0, 0, 1, 4096), b=Dense(0, 0, 1, 4096))
        kinds = [choice["kind"] for choice in choose.candidates(given, ARCH)]
        assert ("tiles" in kinds) == (block in stationary.SIZES)
        for choice in choose.candidates(given, ARCH):
            assert set(choose.lower(epilogue, given, ARCH, 132, choice).specs) <= set(known)
        assert set(choose.specs(epilogue, given, ARCH)) <= set(known)


def test_summands_have_no_variant():
    assert tiles.variants((kl.Add(),), (16, 16), HALVES, ARCH) == []


SPECS = {
    spec.description.removeprefix("blocksparse tiles "): spec
    for epilogue in EPILOGUES.values()
    for block in stationary.SIZES
    for spec in tiles.variants(epilogue, (block, block), HALVES, ARCH)
}
COMPILED = ("float16 sdd 16x16 right_lines", "bfloat16 sdd 64x64 left_lines")


@pytest.mark.parametrize("name", slow_but(COMPILED, SPECS))
def test_kernels_compile_without_spills(name):
    """With as many registers at launch as 384 threads can have: those that multiply take 232 of
    what that leaves."""
    made = compiled(SPECS[name], ARCH)
    assert made.spilled == 0 and not made.serialized
    assert made.registers * hopper.THREADS <= targets.REGISTERS
    assert made.registers == 168 and made.shared <= targets.SHARED_BYTES[ARCH]
