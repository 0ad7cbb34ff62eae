"""Hopper's kernel of float32 products by pairs of float16 words, on the host."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.kernels.spmm.hopper_words import HopperWords
from kernlib.families.blocksparse.lowering import choose, hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Spmm, Values
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse import by_kernel
from tests.families.blocksparse.emulated import Case, error, strided
from tests.families.blocksparse.products import Operands
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator
from tests.support.speeds import slow_but

ARCH, KERNEL = hopper.ARCH, HopperWords()
COUNT = 5  # multiprocessors, so that a block has several tiles
GATE = 2e-7  # of sums that the emulator does not truncate
EPILOGUES = {
    "none": (),
    "gelu": (kl.Bias(), kl.Gelu()),
    "relu": (kl.Bias(), kl.Relu()),
    "add": (kl.Add(),),
    "gate": (kl.Gate(),),
}
CASES = {
    "64": Case("float32", (64, 64), (3, 5), 0.4, 2, 2, 72),
    "64 transposed": Case("float32", (64, 64), (3, 2), 0.5, 1, 1, 133, True),
    "128": Case("float32", (128, 128), (3, 3), 0.7, 1, 2, 8),
    "128 transposed": Case("float32", (128, 128), (3, 3), 0.7, 1, 1, 130, True),
    "128 x 64": Case("float32", (128, 64), (2, 5), 0.4, 2, 1, 41, True),
    "64 x 128": Case("float32", (64, 128), (3, 3), 0.6, 2, 1, 200),
}
ORDERS = [("rows", "rows"), ("columns", "columns"), ("rows", "apart")]


class Product(Operands):
    """Operands of a case, and its result by these kernels."""

    def run(self, emulator: Emulator, epilogue: str = "none", **beside) -> torch.Tensor:
        def lower(problem: Spmm) -> Lowered:
            return by_kernel.lower(KERNEL, EPILOGUES[epilogue], problem, ARCH, COUNT)

        scalars = (0.5,) if epilogue == "add" else ()
        return self.launched(emulator, lower, scalars, **beside)


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("64", "128 transposed"), CASES))
@pytest.mark.parametrize("orders", slow_but(ORDERS[:1], ORDERS))
@pytest.mark.parametrize("turned", slow_but((False,), (False, True)))
def test_products(name, orders, turned, emulator, seed):
    made = Product(CASES[name], *orders)
    if turned:
        made.values = made.values.mT.contiguous().mT
    assert error(made.run(emulator), made.wanted()) <= GATE


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("epilogue", ["relu", "add", "gate"])
@pytest.mark.parametrize("name", ["64 transposed", "128"])
def test_epilogues(name, epilogue, emulator, seed):
    made = Product(CASES[name], *ORDERS[1])
    wanted = made.wanted()
    if epilogue == "relu":
        bias = torch.randn(wanted.shape[-2])
        found = made.run(emulator, epilogue, vector0=bias)
        wanted = (wanted + bias.double()[:, None]).relu()
    else:
        y = strided(tuple(wanted.shape), "rows", torch.float32)
        found = made.run(emulator, epilogue, summand0=y)
        y = y.double()
        wanted = wanted + y / 2 if epilogue == "add" else wanted * torch.nn.functional.silu(y)
    assert error(found, wanted) <= 2 * GATE


@pytest.mark.emulated
def test_lines_and_columns_of_any_magnitude(emulator, seed):
    """Each to its own precision, from 2^-60 to 2^60; a block's 64 of the depth have a scale of
    their own too."""
    made = Product(Case("float32", (64, 64), (3, 5), 0.8, 1, 1, 72))
    live = int(made.layout.nnz)
    made.values[:, :live] *= torch.exp2(torch.randint(-30, 31, (live, 64, 1)).float())
    made.dense *= torch.exp2(torch.randint(-60, 61, (1, 72)).float())
    wanted, found = made.wanted(), made.run(emulator).double()
    beside = made.matrix.abs() @ made.dense.double().abs()
    assert ((found - wanted).abs() <= 4e-7 * beside).all()
    made = Product(Case("float32", (64, 64), (3, 2), 0.8, 1, 1, 24, True))
    made.values *= 2.0**-70
    made.dense *= 2.0**60
    assert error(made.run(emulator), made.wanted()) <= GATE


@pytest.mark.emulated
def test_small_numbers_beside_large_ones_keep_their_bits(emulator, seed):
    """Where a line has 2^-24 of its largest number a column has the largest of its own."""
    made = Product(Case("float32", (64, 64), (2, 3), 1.0, 1, 1, 24))
    depth = torch.exp2(torch.randint(-12, 13, (64,)).float())
    made.values *= depth
    made.dense /= depth.repeat(3)[:, None]
    assert error(made.run(emulator), made.wanted()) <= GATE


@pytest.mark.emulated
@pytest.mark.parametrize("large", [2.0**127, 2.0**-118])
def test_the_ends_of_what_float32_holds(large, emulator, seed):
    """Scales near 2^113 do not overflow where results do not, and lines down to 2^-118 keep their
    precision beside large columns."""
    for of_values in (True, False):
        made = Product(Case("float32", (64, 64), (2, 2), 1.0, 1, 1, 8))
        made.values.clamp_(-1.9, 1.9)
        made.dense.clamp_(-1.9, 1.9)
        small = 2.0**-20 if large > 1 else 2.0**100
        one, other = (made.values, made.dense) if of_values else (made.dense, made.values)
        one *= large
        other *= small
        assert error(made.run(emulator), made.wanted()) <= 2 * GATE


@pytest.mark.few(1)
@pytest.mark.emulated
def test_what_is_not_finite_stays_in_its_line_and_column(emulator, seed):
    """And is what float64 makes of it: an infinity of its sign, NaN by 0. Small integers are exact,
    whose low words are 0."""
    made = Product(Case("float32", (64, 64), (2, 2), 1.0, 1, 1, 40))
    made.values.copy_(torch.randint(-3, 4, made.values.shape))
    made.dense.copy_(torch.randint(1, 4, made.dense.shape))
    made.values[0, 0, 3, 5] = math.inf
    made.values[0, 1, 7, 9] = -math.inf
    made.values[0, 2, 20, 0] = math.nan
    made.values[0, 3, 30, 30] = math.inf
    made.dense[0, 0, 5, 4] = 0  # by an infinity
    made.dense[0, 0, 5, 5] = -math.inf  # by one of the other sign
    made.dense[0, 0, 70, 6] = math.nan
    made.dense[0, 0, 100, 8] = math.inf
    wanted, found = made.wanted(), made.run(emulator).double()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(0.0, 1e30, -1e30), wanted.nan_to_num(0.0, 1e30, -1e30))


@pytest.mark.emulated
def test_what_no_block_meets_costs_nothing(emulator, seed):
    """Neither NaN nor what is so large that the others would be nothing beside it."""
    made = Product(Case("float32", (64, 64), (1, 3), 1.0, 1, 1, 24))
    mask = torch.tensor([[[True, False, True]]])
    made.layout.update_(mask)
    for strange in (math.nan, 1e30):
        made.dense[..., 64:128, :] = 0
        wanted = made.wanted()
        made.dense[..., 64:128, :] = strange
        assert error(made.run(emulator), wanted) <= GATE


@pytest.mark.few(1)
@pytest.mark.emulated
def test_a_result_does_not_depend_on_its_batch(emulator, seed):
    made = Product(CASES["64"])
    whole = made.run(emulator).clone()
    case = made.case._replace(batch=1)
    for index in range(2):
        alone = Product(case)
        alone.layout, alone.values = made.layout, made.values[index : index + 1]
        alone.dense = made.dense[index : index + 1]
        assert torch.equal(alone.run(emulator)[0], whole[index])


def problem_of(block: int = 64, columns: int = 4096, capacity: int = 1024, **changes) -> Spmm:
    """Of 4096 x 4096 matrices."""
    count = 4096 // block
    blocks = Blocks(block, block, count, count, 1, capacity * 64 * 64 // block**2)
    dense = Dense(0, 0, columns, 1)
    values = Values(0, block * block, block, 1)
    made = Spmm("float32", "fp32", blocks, 1, columns, False, values, dense, dense)
    return made._replace(**changes)


def test_what_it_takes():
    problem = problem_of()
    takes = KERNEL.takes
    assert takes(problem, ARCH) and takes(problem._replace(transposed=True), ARCH)
    assert not takes(problem, "sm_90") and not takes(problem, "sm_100a")
    for other in (
        {"dtype": "float16"},
        {"precision": "tf32"},
        {"columns": 0},
        {"dense": problem.dense._replace(column=2)},
        {"values": problem.values._replace(row=128, column=2)},
        {"blocks": problem.blocks._replace(rows=32)},
        {"blocks": problem.blocks._replace(capacity=0)},
        {"columns": 2**31 - 64},
    ):
        assert not takes(problem._replace(**other), ARCH)
    odd = {"dense": Dense(0, 0, 1, 4099, 4), "out": Dense(0, 0, 3, 12291, 4)}
    assert takes(problem._replace(**odd), ARCH)


def taken(problem: Spmm, count: int = 132) -> str:
    return choose.default(problem, count, ARCH)["kind"]


def test_little_work_is_left_to_the_portable_kernel():
    assert taken(problem_of()) == taken(problem_of(128)) == "hopper_words"
    assert taken(problem_of(columns=16)) == "portable"
    assert taken(problem_of(columns=32)) == "portable"  # of 128 that would be multiplied
    assert taken(problem_of(columns=512)) == "hopper_words"
    assert taken(problem_of(capacity=40)) == "portable"  # one block in a hundred
    assert taken(problem_of(precision="tf32")) == "portable"
    kinds = [choice["kind"] for choice in choose.candidates(problem_of(), ARCH)]
    assert kinds[0] == "hopper_words" and set(kinds[1:]) == {"portable"}


def test_variants_are_of_float32_and_its_precision():
    known = choose.variants((), "dsd", (64, 64), ("float32",), ARCH, "tf32")
    assert not any("words" in spec.entry or "pack" in spec.entry for spec in known)
    assert not by_kernel.variants(KERNEL, (), (32, 32), ("float32",), ARCH)


SPECS = [
    spec
    for epilogue in EPILOGUES.values()
    for block in ((64, 64), (128, 128), (64, 128))
    for spec in by_kernel.variants(KERNEL, epilogue, block, ("float32",), ARCH)
    if spec.threads != 1024
]
SPECS = list(dict.fromkeys(SPECS))


@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, marks=[pytest.mark.slow] * (i > 1)) for i, s in enumerate(SPECS)],
    ids=lambda spec: spec.entry,
)
def test_kernels_compile(spec):
    """Without spills, two accumulators of a thread and the scales included."""
    made = compiled(spec, ARCH)
    assert not made.spilled and not made.serialized
    assert made.shared <= 227 * 1024
