"""The order in which blocks take a product's tiles, sorted on the host."""

from __future__ import annotations

import pytest
import torch

from kernlib.families.blocksparse.kernels import order
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.layout import NAMES
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Scope, Spmm, Values
from tests.families.blocksparse.emulated import Case, blocks_of, layout_of
from tests.support.compiled_kernels import compiled
from tests.support.emulation import maps
from tests.support.emulation.emulator import Emulator

FIRST = 5  # tile that the counter gives first


def problem_of(blocks: Blocks, transposed: bool = False) -> Spmm:
    rows = Dense(0, 0, 64, 1)
    values = Values(0, blocks.rows * blocks.cols, blocks.cols, 1)
    return Spmm("float16", "fp32", blocks, 1, 64, transposed, values, rows, rows)


def order_of(emulator: Emulator, problem: Spmm, known: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the kernel writes, from a workspace of what nobody wrote."""
    units = -(-problem.lines // order.TILE_LINES) * problem.blocks.heads
    step = ORDER.step(units, problem, FIRST)
    found = torch.full((ORDER.workspace(problem) // 4,), -1, dtype=torch.int32)
    addresses = [{**known, "workspace": found}[name].data_ptr() for name, _ in step.pointers]
    maps.launch(emulator, step, addresses)
    return found


def steps_of(mask: torch.Tensor, group: int) -> torch.Tensor:
    """Of each unit: along the depth, the blocks that one of its lines stores."""
    padded = torch.nn.functional.pad(mask, (0, 0, 0, -mask.shape[1] % group))
    return padded.unflatten(1, (-1, group)).any(2).sum(-1).flatten()


CASES = {  # block, grid, density, heads
    "one unit": (64, (1, 3), 0.5, 1),
    "one word": (64, (21, 20), 0.2, 3),
    "three words": (32, (37, 70), 0.1, 5),
    "more words than lanes": (128, (40, 1023), 0.02, 1),
    "eight lines": (16, (50, 300), 0.05, 4),
    "units of several turns": (64, (64, 9), 0.3, 34),
    "many units": (128, (300, 33), 0.1, 13),
    "the most": (128, (256, 5), 0.4, 16),
    "none stored": (64, (40, 40), 0.0, 60),
    "all stored": (64, (40, 40), 1.0, 60),
}
SLOW = [name for name in CASES if name not in ("three words", "many units")]


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_units_come_by_falling_length(name, transposed, emulator, seed):
    size, grid, density, heads = CASES[name]
    layout = layout_of(Case("float16", (size, size), grid, density, heads))
    mask = layout.mask().view(heads, *grid)
    if transposed:
        mask = mask.mT
    problem = problem_of(blocks_of(layout), transposed)
    found = order_of(emulator, problem, dict(zip(NAMES, layout.tensors, strict=True)))
    wanted = steps_of(mask, 128 // size).argsort(descending=True, stable=True)
    assert found[0] == FIRST
    assert found[1:].tolist() == wanted.tolist()


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1023, 1024, 2047, 4100])
def test_lengths_beyond_the_keys_are_told_apart_in_part(depth, emulator, seed):
    blocks = Blocks(128, 128, 300, depth, 1, 1)
    words = blocks.row_words
    lengths = torch.randint(0, depth + 1, (300,))
    lengths[:3] = torch.tensor([depth, 0, depth])
    stored = torch.arange(words * 32) < lengths[:, None]
    bits = (stored.view(300, words, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    found = order_of(emulator, problem_of(blocks), {"row_bits": bits})
    shift = order.keys(depth)["shift"]
    assert (depth >> shift < order.KEYS) and (shift == 0) == (depth < order.KEYS)
    wanted = (lengths >> shift).argsort(descending=True, stable=True)
    assert found[1:].tolist() == wanted.tolist()


@pytest.mark.emulated
@pytest.mark.parametrize("depth", [9, pytest.param(1100, marks=pytest.mark.slow)])
def test_group_after_group_of_units(depth, emulator, seed):
    """Of two heads each, and the last one of three."""
    blocks = Blocks(128, 128, 11, depth, 7, 1)
    words = blocks.row_words
    lengths = torch.randint(0, depth + 1, (77,))
    stored = torch.arange(words * 32) < lengths[:, None]
    bits = (stored.view(77, words, 32) << torch.arange(32)).sum(-1).to(torch.int32)
    keys = order.keys(depth, 22, 2)
    numbers = {"groups": 11, "units": 77, "lines": 11, "words": words}
    step = ORDER.step_of(1, "row_bits", FIRST, **numbers, **keys)
    found = torch.full((78,), -1, dtype=torch.int32)
    known = {"row_bits": bits, "workspace": found}
    maps.launch(emulator, step, [known[name].data_ptr() for name, _ in step.pointers])
    group = (torch.arange(77) // 22).clamp(max=2)
    wanted = ((2 - group) * depth + (lengths >> keys["shift"])).argsort(
        descending=True, stable=True
    )
    assert found[1:].tolist() == wanted.tolist()


@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.slow), 32, 64, 128])
def test_kernels_compile(size):
    (spec,) = ORDER.specs((), Scope((size, size), ()), hopper.ARCH)
    made = compiled(spec, hopper.ARCH)
    assert made.spilled == 0 and made.registers <= 64
    assert made.shared <= 227 * 1024
