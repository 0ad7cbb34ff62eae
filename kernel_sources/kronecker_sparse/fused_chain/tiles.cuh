// Tiles of a first product whose result, h, lies in shared memory, and the ring of stages.
//
// Facts: tile_facts of kernlib/families/kronecker_sparse/kernels/chain/fused_chain.py.
#pragma once

#include "common/hopper.cuh"

using InputT = Config::InputT;  // storage of x, weights and h
// Whether a unit has 16 l of more, of which each pair has 8 and each warpgroup 4; else it has all
// l, and each pair has 64 rows.
constexpr bool WIDE = Config::WIDE;
// Pairs of warpgroups, 2 or, if not WIDE, 3; and warpgroups of each, 1 or 2.
constexpr int PAIRS = Config::PAIRS, GROUPS = Config::GROUPS;
constexpr int LANES = Config::LANES;  // l of a warpgroup
// Features of a block of h with the same l, whose rows of the first weight are loaded together, l
// by l; 0: a block's rows in their order.
constexpr int QUOTIENT = Config::QUOTIENT;
// 2 where QUOTIENT is a multiple of 8, 1 where it is less, 0 where it is 0.
constexpr int ORDER = Config::ORDER;
// Features of a block of h that a pair computes, and those of a warpgroup: all, or half of them.
constexpr int FIRST_COLUMNS = Config::FIRST_COLUMNS, FIRST_SHARE = Config::FIRST_SHARE;
constexpr int H_CHUNKS = Config::H_CHUNKS;  // 128-byte rows of h along k, for each l
constexpr int STAGES = Config::STAGES;      // of the ring
constexpr int STAGE_BYTES = Config::STAGE_BYTES;  // of room for either product

constexpr int ROW_BYTES = 128;                 // swizzled rows of x, of the first weight and of h
constexpr int ROW = ROW_BYTES / 2;             // elements of one
constexpr int STEP = 16;                       // k of one wgmma
constexpr int WARPGROUPS = PAIRS * GROUPS, THREADS = 128 * (WARPGROUPS + 1);
constexpr int SPAN = WIDE ? WARPGROUPS * LANES : LANES;  // l of a unit
constexpr int TILE_ROWS = WIDE ? 64 : 64 * PAIRS;
constexpr int FIRST_ROWS = WIDE ? 2 * FIRST_COLUMNS : FIRST_COLUMNS;  // of a block's first weight

// A stage of the first product has x and, behind it, the first weight. Three pairs leave less room
// beside h: theirs are two of the ring, of which the second has the rows of the third pair.
constexpr int FIRST_STAGES = PAIRS == 3 ? 2 : 1;
constexpr int BOX_ROWS = PAIRS == 3 ? 64 : TILE_ROWS;  // of one copy of x
constexpr int BOX_BYTES = BOX_ROWS * ROW_BYTES, WEIGHT_BYTES = FIRST_ROWS * ROW_BYTES;
constexpr int FIRST_BYTES = BOX_BYTES + WEIGHT_BYTES;

constexpr int H_CHUNK_BYTES = TILE_ROWS * ROW_BYTES;
constexpr int H_LANE_BYTES = H_CHUNKS * H_CHUNK_BYTES;
constexpr int H_BYTES = SPAN * H_LANE_BYTES;

struct Ring {
    int stage = 0, parity;
    __device__ __forceinline__ explicit Ring(int parity) : parity(parity) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ int ceil_div(int x, int y) { return (x + y - 1) / y; }
