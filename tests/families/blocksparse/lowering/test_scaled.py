"""The kernel of products of float8 with scales."""

from __future__ import annotations

import re

import pytest

from kernlib.families.blocksparse.kernels import scaled
from kernlib.families.blocksparse.kernels.scaled import Scaled
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Spmm, Values
from kernlib.jit import sources
from tests.families.blocksparse import by_kernel
from tests.support.compiled_kernels import compiled

ARCH = hopper.ARCH
WARPGROUPS = ("hopper/run", "narrow/narrow", "sampled_hopper/sampled_hopper", "tiles/tiles")
LAUNCHED = 168  # registers of each of 384 threads: 65536 in all, in whole eights
SPECS = [
    spec
    for spec in by_kernel.variants(Scaled(), (), (128, 128), ("bfloat16",), ARCH)
    if spec.threads == hopper.THREADS
]


@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, marks=[pytest.mark.slow] * bool(i)) for i, s in enumerate(SPECS)],
    ids=lambda spec: spec.entry,
)
def test_kernels_compile(spec):
    made = compiled(spec, ARCH)
    assert not made.spilled and not made.serialized
    assert made.shared <= 227 * 1024


@pytest.mark.parametrize("name", WARPGROUPS)
def test_warpgroups_take_no_more_registers_than_a_launch_has(name):
    """Else they wait for each other for ever."""
    text = sources.read(f"blocksparse/{name}.cuh")
    taken, left = (re.findall(rf"{word}_registers<(\d+)>", text) for word in ("take", "release"))
    assert 2 * int(taken[0]) + int(left[0]) <= 3 * LAUNCHED


def problem(**changes) -> Spmm:
    made = Spmm(
        dtype="bfloat16",
        precision="fp32",
        blocks=Blocks(128, 128, 3, 5, 2, 9),
        batch=4,
        columns=40,
        transposed=False,
        values=Values(9 * 128 * 128, 128 * 128, 128, 1),
        dense=Dense(2 * 40 * 640, 40 * 640, 1, 640),
        out=Dense(2 * 40 * 384, 40 * 384, 1, 384),
    )
    return made._replace(**changes)


def test_a_problem_in_pairs():
    """Two numbers are one of two bytes along the depth; what is written stays."""
    found, given = scaled.in_pairs(problem()), problem()
    assert found.blocks == given.blocks._replace(cols=64) and found.out == given.out
    assert found.values == Values(9 * 128 * 64, 128 * 64, 64, 1)
    assert found.dense == Dense(2 * 40 * 320, 40 * 320, 1, 320)
    assert found.lines == given.lines == 384
    assert Scaled().takes(found, ARCH) and not Scaled().takes(found, "sm_90")


NOT_IN_PAIRS = {
    "blocks": Blocks(128, 64, 3, 5, 2, 9),
    "transposed": True,
    "values": Values(9 * 128 * 128, 128 * 128, 1, 128),
    "dense": Dense(2 * 40 * 640, 40 * 640, 40, 1),
}


@pytest.mark.parametrize("name", NOT_IN_PAIRS)
def test_what_is_no_problem_in_pairs(name):
    assert scaled.in_pairs(problem(**{name: NOT_IN_PAIRS[name]})) is None
