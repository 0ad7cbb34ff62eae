// Tiles of interleaved_gradient/interleaved_gradient.cuh: facts, parameters, shared memory and
// places.
//
// Facts and struct Fixed: class InterleavedGradient of
// kernlib/families/kronecker_sparse/kernels/gradient/interleaved_gradient.py.
#pragma once

#include "common/hopper.cuh"

using InputT = Config::InputT;                      // storage of both operands
constexpr int LANES = Config::LANES;                // d
constexpr int TILE_COLUMNS = Config::TILE_COLUMNS;  // k of a tile: a multiple of 8
constexpr int STAGES = Config::STAGES;              // of the ring
constexpr bool BIAS = Config::BIAS;  // whether the sums of left over n are results too

constexpr int ROW_BYTES = 128;                // swizzled rows of both operands
constexpr int ROW = ROW_BYTES / 2;            // elements of one
constexpr int STEP = 16;                      // n of one wgmma
constexpr int TILE_DEPTH = 32;                // n of a stage
constexpr int WARPGROUPS = 2, TILE_ROWS = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int BOX_BYTES = TILE_DEPTH * ROW_BYTES;  // of one copy
constexpr int LEFT_BOXES = TILE_ROWS * LANES / ROW;
constexpr int RIGHT_BOXES = (TILE_COLUMNS + ROW - 1) / ROW;  // of each l
constexpr int LEFT_BYTES = LEFT_BOXES * BOX_BYTES;
constexpr int RIGHT_BYTES = RIGHT_BOXES * BOX_BYTES;  // of each l
constexpr int STAGE_BYTES = LEFT_BYTES + LANES * RIGHT_BYTES;
constexpr int SUMS = TILE_COLUMNS / 2;        // accumulators of a thread, of each l

struct Maps {
    TensorMap left, right;
};

struct PartialSums {
    // (split, i, l, j, k), rows of `pitch` k; if BIAS, the sum of left is that of the last four.
    float* partial;
};

struct Parameters : Maps, PartialSums, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    unsigned char* stages;
    u64 *full, *empty;
};

// A tile's place, and its stages. Those of the same n are neighbours, so that both operands come
// from device memory but once.
struct Tile {
    int column, row, block, split, first, depth;
    __device__ __forceinline__ Tile(const Parameters& p, u32 index) {
        column = index % p.column_tiles;
        index /= p.column_tiles;
        row = index % p.row_tiles;
        index /= p.row_tiles;
        block = index % p.blocks;
        split = index / p.blocks;
        first = split * p.split_depth;
        depth = min(p.split_depth, (p.depth + TILE_DEPTH - 1) / TILE_DEPTH - first);
    }
};

struct Ring {
    int stage = 0, parity;
    __device__ __forceinline__ explicit Ring(int parity) : parity(parity) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};
