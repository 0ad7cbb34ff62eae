"""Small odd calls, to be run under compute-sanitizer; prints the kinds of kernels that ran."""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

import torch

import kernlib as kl
from kernlib import events
from kernlib.blocksparse import Layout, quantize, scaled_dds, scaled_dsd, softmax
from kernlib.families.blocksparse.kernels.sdd.sampled_hopper import SampledHopper
from kernlib.families.blocksparse.kernels.sdd.stationary import Stationary
from kernlib.families.blocksparse.kernels.sdd.tiles import Tiles
from kernlib.families.blocksparse.kernels.spmm.hopper import Hopper
from kernlib.families.blocksparse.kernels.spmm.hopper_words import HopperWords
from kernlib.families.blocksparse.kernels.spmm.narrow import Narrow
from kernlib.lowering import kernel
from tests.gpu.every_lane import BY_WARP, let_every_lane_arrive
from tests.gpu.families.blocksparse.cases import (
    BLOCKS,
    MODES,
    TYPES,
    in_parts,
    layout_of,
    operands,
    pays_as_ever,
    product,
)


def products(dtype) -> None:
    for block in BLOCKS:
        layout = layout_of(block, (3, 4), heads=2)
        for mode in MODES:
            for of_a, of_b in ((False, False), (True, True)):
                for size in (7, 72):
                    a, b = operands(mode, layout, size, dtype, (2,), of_a, of_b)
                    kl.run_kernel(product(mode, of_a, of_b), layout, a, b)


def few_columns(dtype) -> None:
    for block in BLOCKS:
        layout = layout_of(block, (3, 4), heads=2)
        for size in (1, 9):
            a, b = operands("dds", layout, size, dtype, (2,), False, True)
            kl.run_kernel(product("dds", False, True), layout, a, b)


def rows_that_stay(dtype) -> None:
    """Layouts too small for the kernel to pay: two groups of rows, of which one is not whole, more
    panels than a ring has stages, none of the last ones needed, and slots without blocks."""
    with patch.object(Stationary, "pays", lambda *_: True):
        for block, grid in ((16, (35, 70)), (32, (18, 50)), (64, (9, 27))):
            mask = torch.rand(2, *grid) < 0.2
            mask[..., grid[1] * 3 // 4 :] = False
            layout = Layout(mask, block, capacity=int(mask.sum()) + 21, device="cuda")
            for of_a, of_b in ((False, False), (True, True)):
                for size in (64, 104):
                    a, b = operands("sdd", layout, size, dtype, (), of_a, of_b)
                    kl.run_kernel(product("sdd", of_a, of_b), layout, a, b)


def whole_tiles(dtype) -> None:
    """Layouts too small for it to pay: more steps than a ring has stages, tiles without a block,
    and slots without one."""
    with patch.object(Tiles, "pays", lambda *_: True):
        for block, grid in ((16, (11, 40)), (32, (6, 20)), (64, (3, 10))):
            mask = torch.rand(*grid) < 0.3
            mask[:, grid[1] // 2 :] = False
            layout = Layout(mask, block, capacity=int(mask.sum()) + 21, device="cuda")
            for of_a, of_b in ((False, False), (True, True)):
                a, b = operands("sdd", layout, 392, dtype, (2,), of_a, of_b)
                kl.run_kernel(product("sdd", of_a, of_b), layout, a, b)


def parts_of_sums(dtype) -> None:
    """Sums too short for it to pay: some parts without a block, the last one shorter, and a thread
    of which no result is."""
    with patch.object(kernel, "choose", partial(in_parts, 4)):
        for block in ((16, 16), (32, 32), (16, 64)):
            layout = layout_of(block, (5, 6), heads=2, density=0.3)
            for mode, size in (("sdd", 520), ("dsd", 41), ("dds", 41)):
                for of_a, of_b in ((False, False), (True, True)):
                    a, b = operands(mode, layout, size, dtype, (2,), of_a, of_b)
                    kl.run_kernel(product(mode, of_a, of_b), layout, a, b)


def of_float8() -> None:
    """More steps than a ring has stages, more columns than a tile, lines without blocks."""
    layout = layout_of((128, 128), (3, 10), heads=2)
    values = torch.randn(layout.capacity, 128, 128, device="cuda")
    for size in (9, 136):
        x, own = quantize(torch.randn(2, 2, size, layout.shape[1], device="cuda"), -1)
        stored, scale = quantize(values)
        scaled_dds(x, stored, layout, own, scale, transpose_b=True)
        scaled_dsd(stored, x[..., :8, :], layout, scale, own[..., :8], transpose_b=True)


def layouts() -> None:
    for shape in ((1, 1), (5, 33), (2, 40, 31)):
        mask = torch.rand(shape, device="cuda") < 0.5
        made = Layout(mask, 16, capacity=40)
        made.update_(~mask)
        rows, cols = (torch.randint(-2, 45, (50,), device="cuda") for _ in range(2))
        Layout.from_indices(rows, cols, (40, 31), 16)


def softmaxes(dtype) -> None:
    for block in BLOCKS[:4]:
        layout = layout_of(block, (3, 4), heads=2)
        x = torch.randn(2, layout.capacity, *block, device="cuda").to(dtype).requires_grad_()
        rpe = torch.randn(2, *layout.shape, device="cuda").to(dtype).requires_grad_()
        softmax(x, layout, scale=0.5, rpe=rpe, causal=True).sum().backward()


ARRIVALS = BY_WARP | {
    "blocksparse/hopper/ring.cuh": (("&empty[stage], 4 *", "&empty[stage], 128 *"),),
    "blocksparse/stationary/stationary.cuh": (("s.begin(1)", "s.begin(32)"),),
    "blocksparse/stationary/produce.cuh": (
        ("full, STAGE_BYTES);", "full, STAGE_BYTES); else barrier_arrive(full);"),
        (
            "barrier_arrive(&s.full[ring.stage]);\n    }",
            "}\n    barrier_arrive(&s.full[ring.stage]);",
        ),
    ),
}


def main(numbers: str, tool: str) -> None:
    kinds = set()
    HopperWords.pays = SampledHopper.pays = lambda *_: True  # for products as small as these too
    Hopper.pays = Narrow.pays = pays_as_ever
    if tool == "racecheck":
        let_every_lane_arrive(ARRIVALS)
    events.subscribe(lambda e: e.name == "launch" and kinds.add(e.description.split()[1]))
    layouts()
    products(TYPES[numbers])
    few_columns(TYPES[numbers])
    rows_that_stay(TYPES[numbers])
    whole_tiles(TYPES[numbers])
    parts_of_sums(TYPES[numbers])
    if numbers == "fp16":
        of_float8()
    softmaxes(TYPES[numbers])
    torch.cuda.synchronize()
    print("done", *sorted(kinds))


if __name__ == "__main__":
    main(*sys.argv[1].split("-"))
