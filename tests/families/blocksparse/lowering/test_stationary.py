"""Hopper's kernel of the stored blocks of a product of small depth: run by threads of the host,
which problems it takes and when it pays, and what NVRTC makes of it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.lowering import choose, stationary
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div
from tests.families.blocksparse.emulated import GATES, Case, error
from tests.families.blocksparse.squares import ARCH, HALVES, Product, problem
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.kernels import only
from tests.support.speeds import slow_but

EPILOGUES = {
    "none": (),
    "gelu": (kl.Scale(), kl.Gelu()),
    "add": (kl.Scale(), kl.Gelu(), kl.Add()),
    "gate": (kl.Gate(), kl.Add()),
}

# A product, whose columns are its depth, and how a and b lie.
CASES = {
    "16": (Case("float16", (16, 16), (9, 21), 0.3, 2, 2, 64), "rows", "rows"),
    "16, 128 deep": (Case("bfloat16", (16, 16), (35, 20), 0.3, 1, 1, 128), "columns", "columns"),
    "16, many panels": (Case("float16", (16, 16), (3, 140), 0.2, 1, 1, 72), "rows", "columns"),
    "16, more rows": (Case("float16", (16, 16), (70, 9), 0.3, 1, 2, 16), "columns", "rows"),
    "32": (Case("bfloat16", (32, 32), (19, 7), 0.4, 2, 1, 40), "rows", "columns"),
    "32, many panels": (Case("float16", (32, 32), (3, 50), 0.3, 1, 1, 128), "columns", "rows"),
    "64": (Case("float16", (64, 64), (9, 5), 0.4, 1, 2, 64), "rows", "rows"),
    "64, many panels": (Case("float16", (64, 64), (2, 21), 0.5, 1, 1, 120), "rows", "columns"),
    "odd depth": (Case("float16", (16, 16), (5, 9), 0.4, 2, 1, 33), "columns", "rows"),
    "depth 8": (Case("float16", (32, 32), (5, 9), 0.4, 1, 1, 8), "rows", "columns"),
    "empty": (Case("float16", (16, 16), (5, 9), 0.0, 2, 2, 64), "rows", "rows"),
    "full": (Case("float16", (16, 16), (9, 40), 1.0, 1, 1, 64), "rows", "rows"),
    "sparse": (Case("float16", (32, 32), (40, 40), 0.01, 2, 1, 64), "rows", "rows"),
}
FAST = ("16", "16, many panels", "32", "64, many panels", "odd depth", "empty")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(kernels_of(tmp_path_factory))


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_products_are_right(name, emulator, seed):
    """Also in slots that hold no block, of which there are some."""
    case, *orders = CASES[name]
    made = Product(case, *orders)
    assert error(made.run(stationary, emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("block", stationary.SIZES)
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("orders", [*itertools.product(("rows", "columns"), repeat=2)])
def test_both_orders_of_both_operands(orders, depth, block, emulator, seed):
    case = Case("bfloat16", (block, block), (640 // block + 1, 320 // block), 0.3, 2, 1, depth)
    made = Product(case, *orders)
    assert error(made.run(stationary, emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("gelu", "add"), [n for n in EPILOGUES if n != "none"]))
@pytest.mark.parametrize("block", slow_but((16, 32), stationary.SIZES))
def test_epilogues(block, name, emulator, seed):
    """In place where it adds: what is read and written twice would show."""
    case = Case("float16", (block, block), (300 // block, 5), 0.5, 2, 2, 48)
    made = Product(case)
    wanted, live = made.wanted(), int(made.layout.nnz)
    y = torch.randn(made.out.shape).to(case.dtype)
    if name == "gelu":
        found = made.run(stationary, emulator, EPILOGUES[name], (1.5,))
    elif name == "add":
        made.out.copy_(y)
        found = made.run(stationary, emulator, EPILOGUES[name], (1.5, 0.5), summand0=made.out)
    else:
        z = torch.randn(*made.out.shape[:-2], block, block).to(case.dtype).mT
        found = made.run(stationary, emulator, EPILOGUES[name], (0.25,), summand0=y, summand1=z)
    if name == "gate":
        wanted = wanted * torch.nn.functional.silu(y.double()) + z.double() / 4
    else:
        wanted = torch.nn.functional.gelu(1.5 * wanted)
    if name == "add":
        wanted += y.double() / 2
    wanted[:, live:] = 0
    assert error(found, wanted) <= 2 * GATES[case.numbers]


@pytest.mark.emulated
def test_a_summand_that_does_not_count_is_not_read(emulator, seed):
    made = Product(Case("float16", (16, 16), (5, 12), 0.3, 1, 2, 64))
    nothing = torch.full_like(made.out, math.nan)
    found = made.run(stationary, emulator, (kl.Add(),), (0.0,), summand0=nothing)
    assert error(found, made.wanted()) <= GATES["float16"]


# Arithmetic of launches, and choices.


def test_what_it_takes():
    def takes(given: Sdd, arch: str = ARCH) -> bool:
        return stationary.takes(given, arch)

    plain = problem()
    blocks, a, values = plain.blocks, plain.a, plain.values
    assert takes(plain) and not takes(plain, "sm_90") and not takes(plain, "sm_80")
    assert all(takes(problem(block=block, depth=128)) for block in stationary.SIZES)
    assert not takes(problem(block=128)) and not takes(problem(depth=136))
    assert not takes(plain._replace(dtype="float32"))
    assert not takes(plain._replace(blocks=blocks._replace(cols=32)))
    assert not takes(plain._replace(blocks=blocks._replace(capacity=0)))
    assert not takes(plain._replace(a=a._replace(alignment=8)))
    assert not takes(plain._replace(a=a._replace(line=68)))
    assert not takes(plain._replace(b=Dense(0, 0, 8192, 2)))
    assert not takes(plain._replace(values=values._replace(alignment=8)))
    assert not takes(plain._replace(values=values._replace(slot=512)))
    assert not takes(plain._replace(values=values._replace(row=24)))  # nor do rows of a block
    assert takes(plain._replace(summands=(values,)))
    assert not takes(problem(depth=128, summands=(values,)))  # which have no registers


@pytest.mark.parametrize("count", [1, 78, 132])
@pytest.mark.parametrize("n, heads", [(128, 1), (512, 3), (4096, 1), (4096, 16), (8192, 5)])
def test_units_cover_all_panels(n, heads, count):
    given = problem(n, heads=heads)
    units, groups, splits, panels, a_unit = stationary.numbers(given, count)[1:6]
    assert groups * 512 >= n > (groups - 1) * 512 and panels == ceil_div(n, 128)
    assert units == groups * splits * heads
    assert (splits - 1) * a_unit < panels <= splits * a_unit
    grid = only(stationary.lower((), given, ARCH, count)).grid
    assert grid == (min(units, count), 1)


def test_multiprocessors_have_units():
    """128 units at 16 heads, and as many at one by splitting lines of 32 panels into 16."""
    assert stationary.panels_a_unit(problem(heads=16), 132) == 32
    assert stationary.panels_a_unit(problem(), 132) == 2
    assert stationary.panels_a_unit(problem(), 8) == 32


def kind(given: Sdd, count: int = 132) -> str:
    return choose.default(given, choose.candidates(given, ARCH), count)["kind"]


def test_it_is_taken_where_it_pays():
    others = {16: "sampled", 32: "sampled", 64: "hopper"}
    for block, other in others.items():
        known = [choice["kind"] for choice in choose.candidates(problem(block=block), ARCH)]
        assert list(dict.fromkeys(known))[:3] == ["stationary", "tiles", other]
        assert kind(problem(block=block)) == "stationary"
        for density, depth in itertools.product((0.1, 0.25, 0.5), (64, 128)):
            given = problem(block=block, density=density, depth=depth, heads=16)
            assert kind(given) == "stationary"
        assert kind(problem(block=block, density=0.005, heads=16)) == other  # panels for nothing
        assert kind(problem(512, block=block)) == other  # four units
        assert kind(problem(block=block, depth=256)) != "stationary"
    assert kind(problem(block=128)) == "hopper"


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("block", (16, 32, 64, 128))
def test_variants_are_all_that_a_problem_takes(block, epilogue):
    epilogue = EPILOGUES[epilogue]
    known = choose.variants(epilogue, "sdd", (block, block), HALVES, ARCH)
    assert len(set(known)) == len(known)
    summands = sum(len(part.summands) for part in epilogue)
    for depth, dtype, turned in itertools.product((8, 64, 72, 128), HALVES, (False, True)):
        given = problem(block=block, depth=depth, dtype=dtype)
        given = given._replace(summands=(given.values,) * summands)
        if turned:
            given = given._replace(a=Dense(0, 0, 1, 4096), b=Dense(0, 0, 1, depth))
        for choice in choose.candidates(given, ARCH):
            lowered = choose.lower(epilogue, given, ARCH, 132, choice)
            assert set(lowered.specs) <= set(known)
        assert set(choose.specs(epilogue, given, ARCH)) <= set(known)


SPECS = {
    spec.description.removeprefix("blocksparse stationary "): spec
    for epilogue in EPILOGUES.values()
    for block in stationary.SIZES
    for spec in stationary.variants(epilogue, (block, block), HALVES, ARCH)
}
COMPILED = (
    "float16 sdd 16x16 depth64 right_lines",
    "bfloat16 sdd 16x16 depth128",
    "float16 sdd 64x64 depth128 left_lines right_lines",
)


@pytest.mark.parametrize("name", slow_but(COMPILED, SPECS))
def test_kernels_compile_without_spills(name):
    """With as many registers at launch as 640 threads can have: those that multiply take 112 of
    what that leaves."""
    made = compiled(SPECS[name], ARCH)
    assert made.spilled == 0 and not made.serialized
    assert made.registers * stationary.THREADS <= targets.REGISTERS
    assert made.registers == 96 and made.shared <= targets.SHARED_BYTES[ARCH]
