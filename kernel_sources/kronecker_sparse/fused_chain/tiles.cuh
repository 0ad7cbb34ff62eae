// Tiles of a first product whose result, h, lies in shared memory, and the ring of stages.
#pragma once

#include "common/hopper.cuh"

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
