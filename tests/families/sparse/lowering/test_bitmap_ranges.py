"""Products of bitmap matrices of several ranges of columns: which CTAs take all ranges of their
slabs, what they hold meanwhile, and those kernels run on the host."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch

from kernlib.families.sparse.kernels.bitmap import bitmap as kernels
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, facts_of
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.sparse import compress
from tests.families.sparse.cases import random
from tests.support.emulation.emulator import Emulator, kernels_of

LARGEST = 4880  # bytes of the largest chunk at density .5


def problem(rows, cols, columns, largest=LARGEST, name="bitmap"):
    facts = (("largest", largest),)
    return Problem(rows, cols, columns, "float16", cols, False, (rows, 1), facts, name)


def fixed(step):
    fields = kernels.Bitmap.fixed
    return dict(zip(fields.names, struct.unpack(fields.format, step.fixed), strict=True))


ONE_LAUNCH = {  # by rows, columns and vectors on 132 multiprocessors
    (4096, 11008, 1): True,
    (4096, 11008, 4): True,
    (4096, 11008, 8): False,  # x of two more ranges would be read anew
    (8192, 8192, 8): True,
    (4096, 14336, 2): True,
    (4096, 14336, 4): False,
    (5120, 13824, 1): False,  # some CTAs would have 12 units, where all have at most 10
    (1024, 8192, 1): False,  # 64 CTAs would have 2 units, where 128 have one
    (4096, 4096, 8): True,  # one range
}


@pytest.mark.parametrize("case", ONE_LAUNCH, ids=str)
def test_where_ctas_take_all_ranges(case):
    rows, cols, _ = case
    lowered = choose.lower((), problem(*case), "sm_90a", 132)
    numbers, slabs = fixed(lowered.steps[0]), rows // 16
    together = len(lowered.steps) == 1
    assert together == ONE_LAUNCH[case] == (lowered.workspace == 0)
    units = slabs if together else slabs * numbers["ranges"]
    ctas = min(units, 132)
    assert lowered.steps[0].grid == (ctas, 1)
    assert numbers["cta_units"] * ctas + numbers["longer_ctas"] == units
    chunks = numbers["range_chunks"] * numbers["ranges"] + numbers["wider_ranges"]
    assert chunks == -(-cols // 256)


@pytest.mark.parametrize("arch", ("sm_90a", "sm_80", "sm_89", "sm_120"))
@pytest.mark.parametrize("columns", (1, 2, 8))
@pytest.mark.parametrize("largest", (512, 1504, 3050, 4880, 8704))
@pytest.mark.parametrize("rows", (16, 4096, 30_000, 300_000))
def test_running_sums_lie_behind_the_ring(rows, largest, columns, arch):
    lowered = choose.lower((), problem(rows, 8192, columns, largest), arch, 132)
    step, numbers = lowered.steps[0], fixed(lowered.steps[0])
    warps, slabs = step.spec.threads // 32, -(-rows // 16)
    if len(lowered.steps) == 2:
        assert numbers["running"] == step.spec.shared_bytes
        return
    of_slab = 64 if columns == 1 else 512
    running = -(-slabs // step.grid[0]) * of_slab if numbers["ranges"] > 1 else 0
    assert numbers["running"] % 128 == 0
    assert numbers["running"] + running <= step.spec.shared_bytes
    depth = 2 if arch in OVERLAPPING else 3
    sums = 4 * 64 if columns == 1 else depth * 512
    ring = warps * numbers["stages"] * numbers["slot_bytes"]
    assert warps * sums + kernels.RING_OFFSET + ring <= numbers["running"]
    assert numbers["stages"] >= 1


def test_codes_take_fewer_ranges_at_a_time():
    """Their warps are more, so ranges are fewer; of four x would become digits four times."""
    for cols, steps in ((11008, 1), (28672, 2)):
        lowered = choose.lower((), problem(8192, cols, 1, 2700, "bitmap-int8"), "sm_90a", 132)
        assert len(lowered.steps) == steps


@pytest.fixture
def multiply(tmp_path_factory):
    """Products by the kernel of sm_80 on some multiprocessors, and the launches of the call."""
    emulator = Emulator(kernels_of(tmp_path_factory))

    def multiplied(w, x, multiprocessors):
        (rows, cols), count = w.shape, len(x)
        stride = -(-cols // 8) * 8
        padded = torch.full((count, stride), torch.nan, dtype=x.dtype)
        padded[:, :cols] = x
        out = torch.full((count + 2, rows), 7, dtype=x.dtype)
        sizes = Problem(
            rows, cols, count, KERNEL_TYPES[x.dtype], stride, False, (rows, 1), facts_of(w.facts),
            w.format,
        )  # fmt: skip
        lowered = choose.lower((), sizes, "sm_80", multiprocessors)
        sums = torch.full((lowered.workspace // 4,), torch.nan)
        places = {**w.tensors, "x": padded, "out": out[1:-1], "workspace": sums}
        step = lowered.steps[0]
        addresses = [places[name].data_ptr() + at for name, at in step.pointers]
        block = struct.pack(f"<{len(addresses)}Q", *addresses) + step.fixed
        memory = ctypes.create_string_buffer(block, len(block))
        emulator.launch(step.spec, step.grid, ctypes.addressof(memory))
        if len(lowered.steps) == 2:  # sum.cuh adds up the sums of ranges
            out[1:-1] = sums.view(-1, count, rows).sum(0)
        assert bool((out[0] == 7).all()) and bool((out[-1] == 7).all())
        return out[1:-1], len(lowered.steps)

    return multiplied


CASES = {  # rows, columns, vectors and multiprocessors
    "one slab": (16, 4100, 1, 1),
    "a slab a CTA": (70, 4100, 2, 5),
    "two slabs": (50, 4100, 8, 2),
    "more than warps": (300, 4100, 1, 1),
    "three ranges": (90, 8200, 4, 2),
    "too many vectors": (50, 4100, 9, 2),
}


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_products_of_several_ranges(multiply, case, dtype, seed):
    rows, cols, count, multiprocessors = CASES[case]
    w, x = compress(random(rows, cols, 0.4, dtype), "bitmap"), torch.randn(count, cols).to(dtype)
    y, launches = multiply(w, x, multiprocessors)
    exact = x.double() @ w.to_dense().double().t()
    assert launches == (1 if count <= 8 else 2)
    bound = torch.finfo(dtype).eps * exact.abs() + 1e-4
    assert bool(((y.double() - exact).abs() <= bound).all())
