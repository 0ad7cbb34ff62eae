"""Many vectors as the right operand of wgmma: sparse/pack.cuh puts each number where products look
for it."""

import ctypes
import struct

import pytest
import torch

from kernlib.families.sparse.kernels import pack
from kernlib.families.sparse.kernels.pack import Pack
from kernlib.families.sparse.lowering.problem import Problem, Scope
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator, kernels_of

GUARD = 256  # bytes before and behind what is packed, which nothing may write


def problem(columns, cols, dtype="float16", stride=None):
    stride = stride or -(-cols // 8) * 8
    return Problem(64, cols, columns, dtype, stride, True, (64, 1), (("width", 512),))


def fragment_order():
    """Which of 32 features each position holds."""
    order = [0] * 32
    for p in range(2):
        for t in range(4):
            for h in range(2):
                for e in range(2):
                    order[16 * p + 8 * h + 2 * t + e] = 8 * t + 4 * p + 2 * h + e
    return order


def expected(x, padded, order):
    columns, cols = x.shape
    blocks = -(-cols // 64)
    whole = torch.zeros(padded, blocks * 64, dtype=torch.int16)
    whole[:columns, :cols] = x
    if order == pack.FRAGMENTS:
        whole = whole.view(padded, -1, 32)[:, :, fragment_order()].reshape(padded, -1)
    units = whole.view(padded, blocks, 8, 8).transpose(0, 1)
    place = torch.arange(8)[None, :] ^ (torch.arange(padded) % 8)[:, None]
    swizzled = torch.empty_like(units)
    return swizzled.scatter_(2, place[None, :, :, None].expand(blocks, padded, 8, 8), units)


@pytest.mark.emulated
@pytest.mark.parametrize("order", (pack.FEATURES, pack.FRAGMENTS))
@pytest.mark.parametrize(
    ("columns", "cols", "padded"),
    ((64, 128, 64), (1, 1, 128), (100, 67, 128), (129, 200, 192), (65, 8, 72)),
)
def test_each_number_is_in_its_place(columns, cols, padded, order, tmp_path_factory):
    stride = -(-cols // 8) * 8 + 8
    x = torch.randint(1, 2**15, (columns, stride), dtype=torch.int16)
    given = problem(columns, cols, stride=stride)
    size = pack.nbytes(given, padded)
    page = torch.full((size + 2 * GUARD,), 0x55, dtype=torch.uint8)
    step = Pack().step(given, "sm_90a", padded, order, begin=16)
    assert step.pointers == (("x", 0), ("workspace", 16)) and step.overlaps
    begin = page.data_ptr() + GUARD
    assert begin % 16 == 0 and x.data_ptr() % 16 == 0
    block = struct.pack("<2Q", x.data_ptr(), begin) + step.fixed
    assert len(block) == 2 * 8 + Pack.fixed.size
    buffer = ctypes.create_string_buffer(block, len(block))
    emulator = Emulator(kernels_of(tmp_path_factory))
    emulator.launch(step.spec, step.grid, ctypes.addressof(buffer))
    packed = page[GUARD : GUARD + size].view(torch.int16)
    assert torch.equal(packed, expected(x[:, :cols], padded, order).flatten())
    assert bool((page[:GUARD] == 0x55).all()) and bool((page[-GUARD:] == 0x55).all())


def test_how_large_it_is():
    assert pack.nbytes(problem(64, 100), 128) == 2 * 128 * 128
    assert Pack().step(problem(512, 4096), "sm_90a", 512).grid == (512, 1)
    assert not Pack().step(problem(64, 64), "sm_80", 64).overlaps


@pytest.mark.parametrize("arch", ("sm_90a", "sm_80"))
@pytest.mark.parametrize("order", (pack.FEATURES, pack.FRAGMENTS))
def test_variants_compile(order, arch):
    spec = Pack().spec((), Pack.Variant(order), arch)
    assert spec == Pack().step(problem(64, 64), arch, 64, order).spec
    made = compiled(spec, arch)
    assert not made.spilled and made.registers <= 40 and made.instructions < 400


def test_variants_are_of_two_byte_dtypes():
    halves = Scope("bitmap", ("float16", "bfloat16", "float32"), "sm_90a")
    (spec,) = Pack().specs((), halves, "sm_90a")
    assert spec == Pack().step(problem(64, 64), "sm_90a", 64, pack.FRAGMENTS).spec
    assert Pack().specs((), halves._replace(dtypes=("float32",)), "sm_90a") == []
