// Tiles of hopper/hopper.cuh: facts, parameters, shared memory and places.
//
// Facts and struct Fixed: class Hopper of
// kernlib/families/kronecker_sparse/kernels/factor/hopper.py, and WeightGradient of
// kernlib/families/kronecker_sparse/kernels/gradient/weight_gradient.py.
#pragma once

#include "common/hopper.cuh"
#include "common/parameters.cuh"

using InputT = Config::InputT;    // storage of x and w
using AccT = Config::AccT;        // arithmetic
using OutputT = Config::OutputT;  // storage of y
// Whether x, and y, are (features, batch), else (batch, features) and d = 1; the same for both
// unless in half types.
constexpr bool BATCH_LAST = Config::BATCH_LAST, OUT_LAST = Config::OUT_LAST;
// Output features of a tile: a multiple of 8, of a 128-byte row if there are several tiles a group.
constexpr int TILE_COLUMNS = Config::TILE_COLUMNS;
constexpr int STAGES = Config::STAGES;           // tiles of x under way
constexpr int OUT_PARTS = Config::OUT_PARTS;     // parts of tiles of y of a warpgroup
constexpr bool HALF_INPUT = Config::HALF_INPUT;  // whether x is no float
// Blocks of w along k that stay in shared memory; 0: w moves like x.
constexpr int RESIDENT = Config::RESIDENT;
// fp32: 3 for split products (3xTF32), 1 for TF32; half types: 1.
constexpr int PRODUCTS = Config::PRODUCTS;
// Whether w comes from hopper/pack.cuh, else by a tensor map, which has j contiguous if RIGHT_LINES
// (half types), else k.
constexpr bool PACKED = Config::PACKED, RIGHT_LINES = Config::RIGHT_LINES;
// Whether sums over parts of k go to a workspace, for split_k_sum.cuh: the gradient by w, with j
// for n, k for j and n for k.
constexpr bool PARTIAL = Config::PARTIAL;

constexpr int ROW_BYTES = 128;                        // swizzled rows of every tile
constexpr int ROW = ROW_BYTES / sizeof(InputT);       // elements of one
constexpr int TILE_DEPTH = ROW;                       // input features of a stage
constexpr int STEP = 32 / sizeof(InputT);             // input features of one wgmma
constexpr int WARPGROUPS = 2, TILE_ROWS = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int SUMS = TILE_COLUMNS / 2;                // accumulators of a thread
constexpr int COPIES = PRODUCTS == 3 ? 2 : 1;         // of w: split into high and low words

constexpr int X_BYTES = TILE_ROWS * ROW_BYTES;
// One block of w along k: for each copy TILE_COLUMNS rows of 128 bytes along k; or, RIGHT_LINES,
// TILE_DEPTH rows of them along j for each part of the columns.
constexpr int W_PARTS = RIGHT_LINES ? (TILE_COLUMNS + ROW - 1) / ROW : 1;
constexpr int W_BYTES = RIGHT_LINES ? W_PARTS * TILE_DEPTH * ROW_BYTES
                                    : COPIES * TILE_COLUMNS * ROW_BYTES;
constexpr int STAGE_BYTES = X_BYTES + (RESIDENT ? 0 : W_BYTES);
constexpr int RESIDENT_BYTES = RESIDENT * W_BYTES;
// A warpgroup stages PART_COLUMNS of y at a time: OUT_LAST blocks of (PART_COLUMNS, ROW), else of
// (64, ROW).
constexpr int PART_COLUMNS = TILE_COLUMNS < ROW ? TILE_COLUMNS : ROW;
constexpr int PARTS = (TILE_COLUMNS + PART_COLUMNS - 1) / PART_COLUMNS;
constexpr int PART_BLOCKS = OUT_LAST ? 64 / ROW : 1;
constexpr int PART_BLOCK_BYTES = (OUT_LAST ? PART_COLUMNS : 64) * ROW_BYTES;
constexpr int PART_BYTES = PART_BLOCKS * PART_BLOCK_BYTES;

struct InMap {
    TensorMap x;
};
template <bool EXISTS>
struct OutMap {
    TensorMap y;
};
template <>
struct OutMap<false> {};

template <bool EXISTS>
struct WeightMap {
    TensorMap w;
};
template <>
struct WeightMap<false> {};

template <bool EXISTS>
struct PackedWeight {
    const unsigned char* packed;  // by hopper/pack.cuh
};
template <>
struct PackedWeight<false> {};

template <bool EXISTS>
struct PartialSums {
    float* partial;  // (split, i, l, row, column), rows of `pitch` columns
};
template <>
struct PartialSums<false> {};

struct Parameters : InMap,
                    OutMap<!PARTIAL>,
                    WeightMap<!PACKED>,
                    PackedWeight<PACKED>,
                    PartialSums<PARTIAL>,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    unsigned char* weights;
    unsigned char* stages;
    unsigned char* out;
    u64 *full, *empty, *weights_full, *weights_empty;
};

// A tile's place, and its blocks of k. Row tiles of the same weights, a group, are neighbours where
// these stay; else the column tiles of the same rows, so that x comes from L2.
struct Tile {
    int group, row, column, block, lane, split, first, depth;
    __device__ __forceinline__ Tile(const Parameters& p, u32 index) {
        if (RESIDENT) {
            row = index % p.row_tiles;
            group = index / p.row_tiles;
            column = group % p.column_tiles;
            index = group / p.column_tiles;
        } else {
            column = index % p.column_tiles;
            row = index / p.column_tiles % p.row_tiles;
            group = index = index / p.column_tiles / p.row_tiles;
        }
        lane = index % p.lanes;
        block = index / p.lanes;
        int all = (p.depth + TILE_DEPTH - 1) / TILE_DEPTH;
        split = first = 0;
        depth = all;
        if (PARTIAL) {
            split = block / p.blocks;
            block %= p.blocks;
            first = split * p.split_depth;
            depth = min(p.split_depth, all - first);
        }
    }
};
