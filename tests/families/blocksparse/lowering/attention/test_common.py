"""What kernels of attention share, run by threads of the host: walks over the tiles of a line, and
the weights that a dropout leaves."""

import ctypes
import struct

import pytest
import torch

from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering.attention import score_source
from kernlib.families.blocksparse.lowering.attention.problem import Score
from kernlib.jit.spec import KernelSpec
from tests.families.blocksparse.lowering.attention.dropout import kept, philox
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated

WALK = """
struct Parameters : LengthPointers<LENGTHS>, CapturedPointers<CAPTURED>, Numbers {{
    const u32* words;
    u64* out;  // number of tiles, then of each its number, its blocks, its groups of the last line
    int lines, line_words, line, rows, cols, unused;
}};
static_assert(sizeof(Parameters) == 16 * 5 + 16 + 24, "as the test lays it out");
constexpr int THREADS = 32;
extern "C" __global__ void walk_tiles(const Parameters p) {{
    Sight sight = sight_of(p, 0, p.rows, p.cols);
    Range range = {along} ? sight.columns_of(p.line * {tile_line}, {tile_line})
                          : sight.rows_of(p.line * {tile_line}, {tile_line});
    Walk<{tile_line}, {tile_depth}, {block_line}, {block_depth}> walk(
        Bits{{p.words, p.lines, p.line_words}}, p.line, range);
    Tile tile;
    u64 count = 0;
    while (walk.next(tile)) {{
        u64* to = p.out + 1 + 3 * count++;
        to[0] = tile.index;
        to[1] = tile.live;
        to[2] = walk.groups_of_line<16>(tile.live, {tile_line} - 1);
    }}
    p.out[0] = count;
}}
"""

# Tile, block, grid, and whether columns follow along a line of rows.
WALKS = {
    "tile is block": ((64, 64), (64, 64), (4, 70), True),
    "blocks of a tile": ((64, 64), (16, 16), (18, 150), True),
    "wide tile": ((64, 128), (32, 16), (7, 300), True),
    "tiles of a block": ((64, 32), (128, 128), (3, 40), True),
    "mixed": ((64, 128), (128, 32), (3, 33), True),
    "columns": ((64, 64), (16, 32), (40, 18), False),
    "columns of large blocks": ((64, 64), (128, 128), (40, 3), False),
}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


def run(emulator, source, entry, block: bytes) -> None:
    memory = ctypes.create_string_buffer(block, len(block))
    spec = KernelSpec("blocksparse", source, entry, 32)
    emulator.launch(spec, (1, 1), ctypes.addressof(memory))


@pytest.mark.parametrize(
    "limits", slow_but(("all", "causal window"), ("all", "causal", "window", "causal window"))
)
@pytest.mark.parametrize(
    "case", slow_but(("blocks of a tile", "tiles of a block", "columns"), WALKS)
)
def test_walks_find_the_tiles_that_store_something(case, limits, emulator, seed):
    """In order, each with the bits of its blocks, and none outside of what rows see."""
    tile, block, grid, along = WALKS[case]
    mask = torch.rand(grid) < 0.04
    layout = Layout(mask, block)
    rows, cols = layout.shape[0] - 5, layout.shape[1] - 3
    left, right = (70, 40) if "window" in limits else (2**30, 2**30)
    score = Score(causal="causal" in limits, window="window" in limits)
    across = 0 if along else 1
    text = WALK.format(
        along=str(along).lower(), tile_line=tile[across], tile_depth=tile[1 - across],
        block_line=block[across], block_depth=block[1 - across],
    )  # fmt: skip
    source = score_source.preamble("float16", score) + text
    words = dict(zip(NAMES, layout.tensors, strict=True))["row_bits" if along else "col_bits"]
    stored = mask if along else mask.T
    elements = stored.repeat_interleave(block[across], 0).repeat_interleave(block[1 - across], 1)
    seen = torch.arange(cols)[None] - torch.arange(rows)[:, None]
    seen = (seen >= -left) & (seen <= (min(right, 0) if score.causal else right))
    seen = seen if along else seen.T
    numbers = [part for n in (1.0, left, right, 0.0, 0) for part in (float(n), 0)]
    for line in range(-(-seen.shape[0] // tile[across])):
        out = torch.full((1 + 3 * 400,), -1, dtype=torch.int64)
        own = struct.pack("<" + "dQ" * 5, *numbers) + struct.pack(
            "<2Q6i", words.data_ptr(), out.data_ptr(), stored.shape[0], words.shape[-1], line,
            rows, cols, 0,
        )  # fmt: skip
        run(emulator, source, "walk_tiles", own)
        assert found(out) == wanted(
            elements, seen, line, tile[across], tile[1 - across], block, across
        )


def found(out):
    return out[1 : 1 + 3 * int(out[0])].view(-1, 3).tolist()


def wanted(elements, seen, line, height, width, block, across):
    """Tiles between the first and the last that rows see, with blocks by their first element."""
    rows = seen[line * height : (line + 1) * height]
    at = rows.any(0).nonzero().flatten()
    if not len(at):
        return []
    tiles = []
    step_down, step_across = min(height, block[across]), min(width, block[1 - across])
    for index in range(int(at[0]) // width, int(at[-1]) // width + 1):
        part = elements[line * height : (line + 1) * height, index * width : (index + 1) * width]
        bits = torch.zeros(height // step_down, width // step_across, dtype=torch.bool)
        own = part[::step_down, ::step_across]
        bits[: own.shape[0], : own.shape[1]] = own
        live = sum(1 << i for i, bit in enumerate(bits.flatten().tolist()) if bit)
        groups = bits[-1].repeat_interleave(step_across // 16).tolist()
        if live:
            signed = live - 2**64 if live >= 2**63 else live
            tiles.append([index, signed, sum(1 << i for i, bit in enumerate(groups) if bit)])
    return tiles


DROP = """
struct Parameters {
    float* out;
    i64 seed;
    float p;
    int rows, cols, head;
};
constexpr int THREADS = 32;
extern "C" __global__ void drop_weights(const Parameters p) {
    Dropout dropout(p.p, p.seed, p.head);
    for (int index = threadIdx.x; index < p.rows * p.cols; index += 32)
        p.out[index] = dropout.keeps_at(index / p.cols, index % p.cols) ? dropout.scale : 0.0f;
}
"""


def test_dropout_is_what_its_seed_says(emulator):
    """Of every head another one, with the share that it promises."""
    source = score_source.preamble("float16", Score(dropout=True)) + DROP
    rows, cols, seed, p = 50, 60, 0x123456789ABCD, 0.3
    expected = kept(seed, p, 2, 3, rows, cols)
    for head in range(6):
        out = torch.full((rows, cols), -1.0)
        run(
            emulator,
            source,
            "drop_weights",
            struct.pack("<Qqf3i", out.data_ptr(), seed, p, rows, cols, head),
        )
        torch.testing.assert_close(out.double(), expected[head // 3, head % 3])
    assert 0.27 < (expected == 0).double().mean() < 0.33
    assert not expected[0, 0].equal(expected[0, 1])


def test_the_generator_is_philox():
    """The known answers of Random123 for 4x32-10."""
    import numpy as np

    zero = [np.array([0], dtype=np.uint64)] * 4
    assert [int(x[0]) for x in philox(zero, 0)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = [np.array([0xFFFFFFFF], dtype=np.uint64)] * 4
    assert [int(x[0]) for x in philox(ones, 2**64 - 1)] == [
        0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
    ]  # fmt: skip
