"""What holds of both of Hopper's kernels that store square blocks by the layout's words, with rows
that stay and of whole tiles: run by threads of the host."""

from __future__ import annotations

import math

import pytest
import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import stationary, tiles
from tests.families.blocksparse.emulated import GATES, Case, error, guarded
from tests.families.blocksparse.squares import Product
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated
KINDS = {"stationary": stationary, "tiles": tiles}
DEPTHS = {"stationary": 72, "tiles": 200}  # two steps and four, the last one not whole
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(kernels_of(tmp_path_factory))


@every_kind
@pytest.mark.parametrize("depth", slow_but((40,), (40, 104)))
@pytest.mark.parametrize("block", slow_but((16,), stationary.SIZES))
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


@every_kind
def test_operands_of_all_heads_and_batches_are_one(kind, emulator, seed):
    made = Product(Case("float16", (32, 32), (5, 6), 0.4, 3, 2, DEPTHS[kind]))
    made.a, made.b = made.a[:, :1].expand(made.a.shape), made.b[:1].expand(made.b.shape)
    assert error(made.run(KINDS[kind], emulator), made.wanted()) <= GATES["float16"]


@every_kind
def test_values_of_a_batch_may_lie_apart(kind, emulator, seed):
    made = Product(Case("float16", (64, 64), (3, 4), 0.5, 1, 2, DEPTHS[kind]))
    capacity = made.layout.capacity
    made.guarded = guarded((2, 1, (capacity + 2) * 4096), "rows", torch.float16)
    made.out = made.guarded[:, 0, : capacity * 4096].unflatten(-1, (capacity, 64, 64))
    wanted = made.wanted()
    assert error(made.run(KINDS[kind], emulator), wanted) <= GATES["float16"]
