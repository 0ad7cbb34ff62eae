"""Every kernel that a product may take is among the variants that are compiled ahead."""

from __future__ import annotations

import itertools

import pytest

import kernlib as kl
from kernlib.families.blocksparse.lowering import choose, hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Spmm, Values

ARCHES = ("sm_80", hopper.ARCH)
NUMBERS = [("float16", "fp32"), ("bfloat16", "fp32"), ("float32", "fp32"), ("float32", "tf32")]
BLOCKS = [*((size, size) for size in (16, 32, 64, 128)), (32, 64), (64, 128), (128, 64)]
SIZE = 4096
EPILOGUES = {
    "none": (),
    "numbers": (kl.Scale(), kl.Gelu()),
    "summand": (kl.Scale(), kl.Gelu(), kl.Add()),
    "two summands": (kl.Gate(), kl.Add()),
}


def blocks_of(block, heads=1, capacity=1000) -> Blocks:
    return Blocks(*block, SIZE // block[0], SIZE // block[1], heads, capacity)


def values_of(block) -> Values:
    return Values(0, block[0] * block[1], block[1], 1)


def products(block, numbers, count: int):
    """Of few and many columns, whose dense operand has lines or columns that lie side by side."""
    columns = (1, 9, 16, 33, 72, 264, SIZE)
    for n, heads, turned in itertools.product(columns, (1, 16), (False, True)):
        across, along = Dense(0, SIZE * n, n, 1), Dense(0, SIZE * n, 1, SIZE)
        for dense, out in ((across, across), (along, along), (along, across)):
            yield Spmm(*numbers, blocks_of(block, heads), 1, n, turned, values_of(block), dense,
                       out, (out,) * count)  # fmt: skip


def sampled_products(block, numbers, count: int):
    for depth, capacity in itertools.product((1, 8, 64, 72, 100, 128, SIZE), (1, 132, 200, 8000)):
        across, along = Dense(0, 0, SIZE, 1), Dense(0, 0, 1, SIZE)
        rows, columns = Dense(0, 0, depth, 1), Dense(0, 0, 1, depth)
        for a, b in ((rows, across), (rows, columns), (along, columns), (along, across)):
            values, blocks = values_of(block), blocks_of(block, capacity=capacity)
            yield Sdd(*numbers, blocks, 1, depth, a, b, values, (values,) * count)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("mode, problems", [("dsd", products), ("sdd", sampled_products)])
def test_variants_are_all_that_a_product_takes(mode, problems, epilogue, block, numbers, arch):
    epilogue, (dtype, precision) = EPILOGUES[epilogue], numbers
    known = choose.variants(epilogue, mode, block, (dtype,), arch, precision)
    assert len(set(known)) == len(known)
    assert set(known) <= set(choose.variants(epilogue, mode, block, (dtype,), arch))
    for problem in problems(block, numbers, sum(len(part.summands) for part in epilogue)):
        for choice in choose.candidates(problem, arch):
            assert set(choose.lower(epilogue, problem, arch, 132, choice).specs) <= set(known)
