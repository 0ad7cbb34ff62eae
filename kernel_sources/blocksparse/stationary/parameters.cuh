// What a launch of stationary.cuh is given, and what its CTAs compute.
#pragma once

#include "blocksparse/summands.cuh"
#include "common/hopper.cuh"

// Written at each launch.
struct Maps {
    TensorMap a, b;
};
struct Lists {
    const u32* row_bits;
    const int* row_ranks;
    const u32* counts;  // of which the first is how many slots hold a block
    OutputT* out;
};
struct Fixed {
    i64 batch_step;                              // of values, in elements; slots lie side by side
    u32 units;
    int groups, splits, panels, panels_a_unit;   // groups of rows, parts of a line of panels
    int grid_rows, row_words, heads, capacity, batch;
    int a_heads, a_batches, b_heads, b_batches;  // 0 where one serves all, else 1
};
struct Parameters : Maps,
                    Lists,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    SummandSides<SUMMANDS>,
                    Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

constexpr u32 ALL = 0xffffffffu;  // lanes
constexpr int WARPS = 16, THREADS = 32 * (WARPS + 4);
constexpr int WARP_ROWS = 32, TILES = WARP_ROWS / 16;  // of a warp; fragments of a down
constexpr int UNIT_ROWS = WARPS * WARP_ROWS;
constexpr int LINES = UNIT_ROWS / BLOCK;               // of blocks, of a unit
constexpr int BLOCK_SIZE = BLOCK * BLOCK;
constexpr int WARP_LINES = BLOCK < WARP_ROWS ? WARP_ROWS / BLOCK : 1;
static_assert(LINES <= 32, "a lane of the producer looks at each");

// A panel: so many columns of b, or rows of a, by the whole depth, in pieces of 64 x 64.
constexpr int PANEL = 128, PANEL_BLOCKS = PANEL / BLOCK, WORD_PANELS = 32 / PANEL_BLOCKS;
constexpr u32 PANEL_BITS = (1u << PANEL_BLOCKS) - 1;
constexpr int ROW_BYTES = 128, PIECE_BYTES = 64 * ROW_BYTES;
constexpr int PIECES_ACROSS = PANEL / 64, PIECES_DEEP = DEPTH / 64;
constexpr int STEPS = DEPTH / 16;  // of a multiplication
constexpr int STAGE_BYTES = PIECES_ACROSS * PIECES_DEEP * PIECE_BYTES;
constexpr int LEFT_STAGES = UNIT_ROWS / PANEL;

// Blocks of 32 and 64 go through rows of shared memory, 2 or 4 KB a warp; those of 16 do not.
constexpr int WARPGROUPS = WARPS / 4, OUT_PARTS = BLOCK == 16 ? 0 : BLOCK / 32;
constexpr int STAGES = (192 * 1024 - WARPGROUPS * OUT_PARTS * PIECE_BYTES) / STAGE_BYTES;

// What is said of a stage: of each line of blocks the bits of the panel and the slot of the first,
// what the stage is, and of which batch. Whole 16 bytes.
constexpr int KIND = 2 * LINES, BATCH = KIND + 1, WORDS = KIND + 4;
constexpr u32 COLUMNS_OF_B = LEFT_STAGES, END = COLUMNS_OF_B + 1;  // below: that part of the rows

#include "blocksparse/hopper/ring.cuh"

// A group of rows of a head and batch, beside some of the panels.
struct Unit {
    int first, end;  // panels
    int group, head, batch;

    __device__ __forceinline__ Unit(const Parameters& p, u32 index) {
        first = int(index % p.splits) * p.panels_a_unit;
        end = min(first + p.panels_a_unit, p.panels);
        index /= p.splits;
        group = int(index % p.groups);
        index /= p.groups;
        head = int(index % p.heads);
        batch = int(index / p.heads);
    }
    __device__ __forceinline__ int first_line() const { return group * LINES; }
};
