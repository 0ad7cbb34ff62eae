// What a launch of stationary.cuh is given, and what its CTAs compute.
#pragma once

#include "blocksparse/hopper/pieces.cuh"
#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/summands.cuh"

using OutputT = Config::OutputT;      // storage of values
constexpr int BLOCK = Config::BLOCK;  // rows and columns of a block: 16, 32 or 64
constexpr int DEPTH = Config::DEPTH;  // 64 or 128: at most so many; the copy engine fills up with 0
constexpr bool LEFT_LINES = Config::LEFT_LINES;    // a has the rows contiguous, else the depth
constexpr bool RIGHT_LINES = Config::RIGHT_LINES;  // b has the columns contiguous, else the depth
constexpr int SUMMANDS = Config::SUMMANDS;

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
struct Parameters : Maps,
                    Lists,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr u32 ALL = 0xffffffffu;  // lanes
constexpr int WARPS = Config::WARPS, THREADS = 32 * (WARPS + 4);
constexpr int WARP_ROWS = 32, TILES = WARP_ROWS / 16;  // of a warp; fragments of a down
constexpr int UNIT_ROWS = WARPS * WARP_ROWS;
constexpr int LINES = UNIT_ROWS / BLOCK;               // of blocks, of a unit
constexpr int BLOCK_SIZE = BLOCK * BLOCK;
constexpr int WARP_LINES = BLOCK < WARP_ROWS ? WARP_ROWS / BLOCK : 1;
static_assert(LINES <= 32, "a lane of the producer looks at each");

// A panel: so many columns of b, or rows of a, by the whole depth, in pieces of 64 x 64.
constexpr int PANEL = 128, PANEL_BLOCKS = PANEL / BLOCK, WORD_PANELS = 32 / PANEL_BLOCKS;
constexpr u32 PANEL_BITS = (1u << PANEL_BLOCKS) - 1;
constexpr int PIECES_ACROSS = PANEL / 64, PIECES_DEEP = DEPTH / 64;
constexpr int STEPS = DEPTH / 16;  // of a multiplication
constexpr int STAGE_BYTES = Config::STAGE_BYTES;
static_assert(STAGE_BYTES == PIECES_ACROSS * PIECES_DEEP * PIECE_BYTES, "as the host has it");
constexpr int LEFT_STAGES = UNIT_ROWS / PANEL;

// What is said of a stage: of each line of blocks the bits of the panel and the slot of the first,
// what the stage is, and of which batch. Whole 16 bytes.
constexpr int KIND = 2 * LINES, BATCH = KIND + 1, WORDS = Config::WORDS;
static_assert(WORDS == KIND + 4, "as the host has it");
constexpr u32 COLUMNS_OF_B = LEFT_STAGES, END = COLUMNS_OF_B + 1;  // below: that part of the rows

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
