"""Kernels that make a layout's tensors, run on the host, against torch; and what NVRTC makes of
them."""

import ctypes
import struct

import pytest
import torch

from kernlib.families.blocksparse.contents import bits
from kernlib.families.blocksparse.contents.sizes import NAMES, tensor_shapes
from kernlib.families.blocksparse.kernels import layout as kernels
from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.lowering.steps import WORKSPACE
from tests.support.compiled_kernels import compiled
from tests.support.speeds import slow_but

GUARD = 64  # words ahead of and behind each tensor that no kernel may write
UNWRITTEN = 0x5A5A5A5A
# Heads, rows and columns of blocks, density, capacity beyond the blocks there are.
CASES = {
    "one": (1, 1, 1, 1.0, 0),
    "one that is not there": (1, 1, 1, 0.0, 3),
    "odd": (1, 33, 65, 0.3, 0),
    "heads": (3, 5, 40, 0.5, 7),
    "full": (2, 32, 32, 1.0, 0),
    "empty": (2, 31, 3, 0.0, 0),
    "room for nothing": (1, 9, 70, 0.5, -10_000),
    "too little room": (2, 33, 65, 0.4, -700),
    "one too many": (1, 40, 33, 0.1, -1),
    "no rows": (2, 0, 5, 0.5, 4),
    "no columns": (2, 5, 0, 0.5, 4),
    "several tiles": (2, 150, 100, 0.05, 0),
    "much room": (1, 3, 3, 0.5, 9_000),
}
MORE_TILES_THAN_A_PASS = 1, 1_048_600, 1  # of scan: 4096 tiles of 256 words


def problem(case, seed):
    heads, rows, cols, density, room = CASES[case]
    mask = torch.rand(heads, rows, cols, generator=torch.Generator().manual_seed(seed)) < density
    capacity = max(0, int(mask.sum()) + room)
    return mask, Blocks(16, 16, rows, cols, heads, capacity)


class Memory:
    """A layout's tensors amid words that nobody may write."""

    def __init__(self, blocks: Blocks):
        self.shapes = dict(zip(NAMES, tensor_shapes(blocks), strict=True))
        self.whole = {}
        for name, shape in self.shapes.items():
            size = 2 * GUARD + torch.Size(shape).numel()
            self.whole[name] = torch.full((size,), UNWRITTEN, dtype=torch.int32)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: t[GUARD:-GUARD].view(self.shapes[n]) for n, t in self.whole.items()}

    def check(self) -> None:
        for name, t in self.whole.items():
            around = torch.cat((t[:GUARD], t[-GUARD:]))
            assert torch.all(around == UNWRITTEN), name


def launch(emulator, lowered, operands) -> None:
    workspace = torch.full((lowered.workspace // 4 + 2 * GUARD,), UNWRITTEN, dtype=torch.int32)
    operands = {**operands, WORKSPACE: workspace[GUARD:]}
    for step in lowered.steps:
        addresses = [operands[name].data_ptr() + at for name, at in step.pointers]
        block = struct.pack(f"@{len(addresses)}P", *addresses) + step.fixed
        memory = ctypes.create_string_buffer(block, len(block))
        emulator.launch(step.spec, step.grid, ctypes.addressof(memory))
    assert torch.all(workspace[:GUARD] == UNWRITTEN)
    assert torch.all(workspace[-GUARD:] == UNWRITTEN)


def agree(memory, wanted) -> None:
    memory.check()
    for (name, found), right in zip(memory.tensors().items(), wanted, strict=True):
        assert torch.equal(found, right), name


def of_mask(emulator, mask, blocks) -> Memory:
    memory = Memory(blocks)
    operands = {"mask": mask.to(torch.uint8), **memory.tensors()}
    launch(emulator, kernels.lower_mask(blocks), operands)
    return memory


def of_indices(emulator, lists, blocks) -> Memory:
    memory = Memory(blocks)
    memory.tensors()["row_bits"].zero_()
    memory.tensors()["counts"].zero_()
    rows, cols, heads = lists
    dtype = str(rows.dtype).removeprefix("torch.")
    indices = kernels.Indices(rows.numel(), dtype, heads is not None)
    given = dict(zip(kernels.INDEX_OPERANDS[:3], (rows, cols, heads), strict=True))
    if heads is None:
        given["given_heads"] = rows
    lowered = kernels.lower_indices(blocks, indices)
    launch(emulator, lowered, {**given, **memory.tensors()})
    return memory


@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES)
def test_masks(case, emulator, seed):
    mask, blocks = problem(case, seed)
    agree(of_mask(emulator, mask, blocks), bits.encode(mask, blocks))


@pytest.mark.emulated
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_of_indices(case, dtype, emulator, seed):
    mask, blocks = problem(case, seed)
    places = mask.nonzero()
    places = places[torch.randperm(len(places))].to(dtype)
    heads, rows, cols = (part.contiguous() for part in places.unbind(1))
    heads = heads if blocks.heads > 1 else None
    agree(of_indices(emulator, (rows, cols, heads), blocks), bits.encode(mask, blocks))


@pytest.mark.few(1)
@pytest.mark.emulated
def test_duplicates_and_indices_out_of_range_are_counted(emulator):
    blocks = Blocks(16, 16, 3, 40, 2, 4)
    lists = [
        (0, 0, 1), (0, 39, 1), (0, 0, 1), (2, 5, 0), (0, 0, 1),  # two duplicates
        (-1, 0, 0), (3, 0, 0), (0, -1, 0), (0, 40, 0), (0, 0, 2), (0, 0, -1),  # six outside
        (2**40, 0, 0), (0, 2**32, 0), (0, 0, -(2**63)),  # and three far outside
        (1, 1, 1), (1, 2, 1), (2, 2, 1),  # two more than there is room for
    ]  # fmt: skip
    rows, cols, heads = torch.tensor(lists).t().contiguous().unbind(0)
    found = of_indices(emulator, (rows, cols, heads), blocks)
    found.check()
    tensors = found.tensors()
    assert tensors["counts"].tolist() == [4, 2, 2, 9]
    assert tensors["rows"].tolist() == [2, 3, 3, 4] and tensors["cols"].tolist() == [5, 0, 39, 1]
    mask = torch.zeros(2, 3, 40, dtype=torch.bool)
    mask[(0, 1, 1, 1), (2, 0, 0, 1), (5, 0, 39, 1)] = True
    right = bits.encode(mask, blocks, (2, 9))
    for name, wanted in zip(NAMES[:5], right[:5], strict=True):
        assert torch.equal(tensors[name], wanted), name


@pytest.mark.emulated
def test_sums_of_more_tiles_than_one_pass_takes(emulator):
    """By scan alone: the kernels ahead of it would take the host minutes."""
    heads, rows, cols = MORE_TILES_THAN_A_PASS
    blocks = Blocks(16, 16, rows, cols, heads, 2_000_000)
    (step,) = (s for s in kernels.lower_mask(blocks).steps if s.spec == kernels.SCAN.spec())
    sums = torch.randint(0, 8192, (-(-rows // 256),), dtype=torch.int32)
    assert sums.numel() > 4096
    ahead, counts = sums.cumsum(0) - sums, torch.full((4,), 7, dtype=torch.int32)
    live = int(sums.sum())
    memory = {WORKSPACE: sums, "counts": counts}
    addresses = [memory[name].data_ptr() for name, _ in step.pointers]
    block = struct.pack("@2P", *addresses) + step.fixed
    held = ctypes.create_string_buffer(block, len(block))
    emulator.launch(step.spec, step.grid, ctypes.addressof(held))
    assert torch.equal(sums.long(), ahead)
    assert counts.tolist() == [2_000_000, live - 2_000_000, 0, 0]


def test_grids_of_many_heads():
    blocks = Blocks(16, 16, 2048, 2048, 32, 2**27)
    lowered = kernels.lower_mask(blocks)
    assert lowered.workspace == 4 * 16384
    assert all(0 < step.grid[0] < 2**31 for step in lowered.steps)


@pytest.mark.parametrize("arch", slow_but(("sm_90a",), ("sm_80", "sm_90a", "sm_120")))
@pytest.mark.parametrize("spec", kernels.specs(), ids=lambda spec: spec.description)
def test_kernels_compile_without_spills(spec, arch):
    found = compiled(spec, arch)
    assert found.spilled == 0 and found.registers <= 64
