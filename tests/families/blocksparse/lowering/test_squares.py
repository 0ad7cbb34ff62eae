"""Hopper's kernels that store square blocks by the layout's words, with rows that stay and of whole
tiles: run by threads of the host, which problems they take and when they pay, and what NVRTC makes
of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.kernels.sdd import stationary
from kernlib.families.blocksparse.kernels.sdd.operands import SQUARES
from kernlib.families.blocksparse.kernels.sdd.stationary import Stationary
from kernlib.families.blocksparse.kernels.sdd.tiles import Tiles
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import choose, hopper
from kernlib.families.blocksparse.lowering.problem import Dense
from kernlib.jit import targets
from tests.families.blocksparse import by_kernel
from tests.families.blocksparse.emulated import GATES, Case, error, guarded
from tests.families.blocksparse.squares import ARCH, HALVES, Product, problem, taken
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

STATIONARY = Stationary()
KINDS = {"stationary": STATIONARY, "tiles": Tiles()}
DEPTHS = {"stationary": 72, "tiles": 200}  # two steps and four, the last one not whole
every_kind = pytest.mark.parametrize("kind", KINDS)
EPILOGUES = {
    "none": (),
    "gelu": (kl.Scale(), kl.Gelu()),
    "add": (kl.Scale(), kl.Gelu(), kl.Add()),
    "gate": (kl.Gate(), kl.Add()),
}
TAKEN = {"stationary": (*EPILOGUES,), "tiles": ("none", "gelu")}

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
DEEP = {  # which tiles alone take
    "16, deeper": (Case("bfloat16", (16, 16), (11, 18), 0.3, 1, 1, 456), "columns", "columns"),
    "32, turned": (Case("float16", (32, 32), (3, 18), 0.3, 1, 2, 320), "columns", "rows"),
    "64, deeper": (Case("float16", (64, 64), (5, 9), 0.4, 1, 2, 264), "rows", "rows"),
    "odd depth, deeper": (Case("float16", (16, 16), (5, 9), 0.4, 2, 1, 129), "columns", "rows"),
    "full, deeper": (Case("float16", (16, 16), (9, 20), 1.0, 1, 1, 192), "rows", "rows"),
}
FAST = ("16", "16, many panels", "32", "64, many panels", "odd depth", "empty")
FAST_DEEP = ("32, turned", "64, deeper", "odd depth, deeper")


@pytest.mark.few(1)
@pytest.mark.emulated
@every_kind
@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_products_are_right(name, kind, emulator, seed):
    """Also in slots that hold no block, of which there are some."""
    case, *orders = CASES[name]
    made = Product(case, *orders)
    assert error(made.run(KINDS[kind], emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(FAST_DEEP, DEEP))
def test_deep_products_are_right(name, emulator, seed):
    case, *orders = DEEP[name]
    made = Product(case, *orders)
    assert error(made.run(KINDS["tiles"], emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@every_kind
@pytest.mark.slow
@pytest.mark.parametrize("block", SQUARES)
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("orders", [*itertools.product(("rows", "columns"), repeat=2)])
def test_both_orders_of_both_operands(orders, steps, block, kind, emulator, seed):
    # The copy engine reads lines at whole 16 bytes: 8 more than a stage of tiles, not 4.
    depth = 64 * steps if kind == "stationary" else 72 * steps
    case = Case("bfloat16", (block, block), (640 // block + 1, 320 // block), 0.3, 2, 1, depth)
    made = Product(case, *orders)
    assert error(made.run(KINDS[kind], emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
@every_kind
@pytest.mark.parametrize("depth", slow_but((40,), (40, 104)))
@pytest.mark.parametrize("block", slow_but((16,), SQUARES))
def test_what_is_not_of_a_block_does_not_count(block, depth, kind, emulator, seed):
    """NaN in rows of a and columns of b that no block is of, and behind the depth."""
    case = Case("float16", (block, block), (9, 12), 0.3, 1, 1, depth)
    mask = torch.rand(1, *case.grid) < case.density
    mask[:, 2:4], mask[:, :, 5] = False, False
    made = Product(case, layout=Layout(mask, block, int(mask.sum()) + 2))
    wanted = made.wanted()
    wide = torch.full((1, 1, 9 * block, depth + 8), math.nan, dtype=case.dtype)
    made.a = wide[..., :depth].copy_(made.a)
    made.a[:, :, 2 * block : 4 * block] = math.nan
    made.b[..., 5 * block : 6 * block] = math.inf
    assert error(made.run(KINDS[kind], emulator), wanted) <= GATES[case.numbers]


@pytest.mark.few(1)
@pytest.mark.emulated
@every_kind
@pytest.mark.parametrize("name", slow_but(("causal", "band"), ("causal", "band", "last", "first")))
def test_what_nobody_needs(name, kind, emulator, seed):
    """Is left out: whole words of a line's bits, panels and tiles, the first and the last ones."""
    rows, cols = torch.arange(67)[:, None], torch.arange(75)
    masks = {
        "causal": cols <= rows,
        "band": (cols - rows).abs() < 3,
        "last": (cols >= 70).expand(67, -1),
        "first": (cols < 2).expand(67, -1),
    }
    case = Case("float16", (16, 16), (67, 75), 0.0, 1, 1, 64)
    made = Product(case, layout=Layout(masks[name][None], 16))
    assert error(made.run(KINDS[kind], emulator), made.wanted()) <= GATES[case.numbers]


@pytest.mark.emulated
@every_kind
def test_bits_depend_on_neither_batch_layout_nor_gpu(kind, emulator, seed):
    case = Case("float16", (16, 16), (9, 20), 0.4, 1, 2, DEPTHS[kind])
    made = Product(case)
    whole = made.layout.to_dense(made.run(KINDS[kind], emulator))
    less = made.layout.mask() & (torch.rand(1, *case.grid) < 0.5)
    part = Product(case._replace(batch=1), layout=Layout(less, 16))
    part.a, part.b = made.a[1:], made.b[1:]
    found = part.run(KINDS[kind], emulator, count=11)
    assert found.equal(part.layout.to_blocks(whole[1:]))


@pytest.mark.emulated
@every_kind
def test_operands_of_all_heads_and_batches_are_one(kind, emulator, seed):
    made = Product(Case("float16", (32, 32), (5, 6), 0.4, 3, 2, DEPTHS[kind]))
    made.a, made.b = made.a[:, :1].expand(made.a.shape), made.b[:1].expand(made.b.shape)
    assert error(made.run(KINDS[kind], emulator), made.wanted()) <= GATES["float16"]


@pytest.mark.emulated
@every_kind
def test_values_of_a_batch_may_lie_apart(kind, emulator, seed):
    made = Product(Case("float16", (64, 64), (3, 4), 0.5, 1, 2, DEPTHS[kind]))
    capacity = made.layout.capacity
    whole = guarded((2, 1, (capacity + 2) * 4096), "rows", torch.float16)
    made.out = whole[:, 0, : capacity * 4096].unflatten(-1, (capacity, 64, 64))
    wanted = made.wanted()
    assert error(made.run(KINDS[kind], emulator), wanted) <= GATES["float16"]


@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("gelu", "add"), [n for n in EPILOGUES if n != "none"]))
@pytest.mark.parametrize("block", slow_but((16, 32), SQUARES))
def test_epilogues(block, name, emulator, seed):
    """In place where it adds: what is read and written twice would show."""
    case = Case("float16", (block, block), (300 // block, 5), 0.5, 2, 2, 48)
    made = Product(case)
    wanted, live = made.wanted(), int(made.layout.nnz)
    y = torch.randn(made.out.shape).to(case.dtype)
    if name == "gelu":
        found = made.run(STATIONARY, emulator, EPILOGUES[name], (1.5,))
    elif name == "add":
        made.out.copy_(y)
        found = made.run(
            KINDS["stationary"], emulator, EPILOGUES[name], (1.5, 0.5), summand0=made.out
        )
    else:
        z = torch.randn(*made.out.shape[:-2], block, block).to(case.dtype).mT
        found = made.run(
            KINDS["stationary"], emulator, EPILOGUES[name], (0.25,), summand0=y, summand1=z
        )
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
    found = made.run(STATIONARY, emulator, (kl.Add(),), (0.0,), summand0=nothing)
    assert error(found, made.wanted()) <= GATES["float16"]


@pytest.mark.emulated
@pytest.mark.parametrize("block", slow_but((16,), SQUARES))
def test_an_epilogue_of_tiles(block, emulator, seed):
    """Zeros stay zeros in slots that hold no block."""
    made = Product(Case("float16", (block, block), (192 // block, 5), 0.5, 2, 2, 136))
    wanted = torch.nn.functional.gelu(1.5 * made.wanted())
    found = made.run(KINDS["tiles"], emulator, EPILOGUES["gelu"], (1.5,))
    assert error(found, wanted) <= 2 * GATES["float16"]


# Arithmetic of launches, and choices.


def test_what_rows_that_stay_take():
    def takes(given, arch: str = ARCH) -> bool:
        return KINDS["stationary"].takes(given, arch)

    plain = problem()
    blocks, a, values = plain.blocks, plain.a, plain.values
    assert takes(plain) and not takes(plain, "sm_90") and not takes(plain, "sm_80")
    assert all(takes(problem(block=block, depth=128)) for block in SQUARES)
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


def test_what_tiles_take():
    def takes(given, arch: str = ARCH) -> bool:
        return KINDS["tiles"].takes(given, arch)

    plain = problem(depth=4096)
    assert takes(plain) and not takes(plain, "sm_90") and not takes(plain, "sm_80")
    assert all(takes(problem(block=block, depth=8)) for block in SQUARES)
    assert not takes(problem(block=128)) and not takes(problem(depth=0))
    assert not takes(plain._replace(dtype="float32"))
    assert not takes(plain._replace(a=plain.a._replace(line=4100)))
    assert not takes(plain._replace(b=Dense(0, 0, 8192, 2)))
    assert not takes(plain._replace(values=plain.values._replace(slot=512)))
    assert not takes(plain._replace(summands=(plain.values,)))


def test_rows_stay_where_it_pays():
    others = {16: "sampled", 32: "sampled", 64: "hopper"}
    for block, other in others.items():
        known = [choice["kind"] for choice in choose.candidates(problem(block=block), ARCH)]
        assert list(dict.fromkeys(known))[:3] == ["stationary", "tiles", other]
        assert taken(problem(block=block)) == "stationary"
        for density, depth in itertools.product((0.1, 0.25, 0.5), (64, 128)):
            given = problem(block=block, density=density, depth=depth, heads=16)
            assert taken(given) == "stationary"
        assert taken(problem(block=block, density=0.005, heads=16)) == other  # panels for nothing
        assert taken(problem(512, block=block)) == other  # four units
        assert taken(problem(block=block, depth=256)) != "stationary"
    assert taken(problem(block=128)) == "hopper"


def test_tiles_are_taken_where_they_pay():
    others = {16: ("sampled", 0.2, 0.1), 32: ("sampled", 0.25, 0.15), 64: ("hopper", 0.4, 0.25)}
    for block, (other, enough, few) in others.items():
        assert taken(problem(block=block, density=enough, depth=4096)) == "tiles"
        for depth in (256, 1024, 4096):
            assert taken(problem(block=block, density=few, depth=depth)) == other
        # Two tiles are two multiprocessors' work, and few blocks share sums.
        assert taken(problem(256, block=block, depth=4096)) == "sampled"
    assert taken(problem(depth=64)) == "stationary"
    assert taken(problem(block=128, depth=4096)) == "hopper"


def test_summands_have_no_variant():
    assert by_kernel.variants(KINDS["tiles"], (kl.Add(),), (16, 16), HALVES, ARCH) == []


SPECS = {
    spec.description.removeprefix("blocksparse "): spec
    for kind, names in TAKEN.items()
    for name, block in itertools.product(names, SQUARES)
    for spec in by_kernel.variants(KINDS[kind], EPILOGUES[name], (block, block), HALVES, ARCH)
}
COMPILED = (
    "stationary float16 sdd 16x16 depth64 right_lines",
    "stationary bfloat16 sdd 16x16 depth128",
    "stationary float16 sdd 64x64 depth128 left_lines right_lines",
    "tiles float16 sdd 16x16 right_lines",
    "tiles bfloat16 sdd 64x64 left_lines",
)
LAUNCHED = {stationary.THREADS: 96, hopper.THREADS: 168}  # registers of each of so many threads


@pytest.mark.parametrize("name", slow_but(COMPILED, SPECS))
def test_kernels_compile_without_spills(name):
    """With as many registers at launch as their threads can have: those that multiply take 112 and
    232 of what that leaves."""
    spec = SPECS[name]
    made = compiled(spec, ARCH)
    assert made.spilled == 0 and not made.serialized
    assert made.registers == LAUNCHED[spec.threads]
    assert made.registers * spec.threads <= targets.REGISTERS
    assert made.shared <= targets.SHARED_BYTES[ARCH]
