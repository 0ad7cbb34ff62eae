// A block's tile of sums by wgmma, and its operands in shared memory, of split/split.cuh and of
// split/reduce.cuh: one producer thread fills stages, and WARPGROUPS warpgroups have 64 rows each.
#pragma once

#include "common/hopper.cuh"
#include "pairwise/split/parameters.cuh"
#include "pairwise/split/ring.cuh"

constexpr int WARPGROUPS = Config::WARPGROUPS;
constexpr int TILE_M = 64 * WARPGROUPS;
constexpr int TILE_N = Config::TILE_N;     // columns, a multiple of 32, and of 64 to reduce them
constexpr int DEPTH = Config::DEPTH;       // features of a stage, a multiple of 16
constexpr int STAGES = Config::STAGES;     // in shared memory
constexpr int COPIES = Config::COPIES;     // 2 for high and low words, three products; else 1, one
constexpr int PROMOTE = Config::PROMOTE;   // stages whose products are summed in one go; 0 for all
constexpr bool ORDERED = Config::ORDERED;  // whether warpgroups issue their products in turns
constexpr int INFOS = Config::INFOS;       // tiles whose PointInfo is there
// Stages of a that stay in shared memory for all of a block's tiles, at least as many as there are;
// 0 where they travel with b's.
constexpr int RESIDENT = Config::RESIDENT;
static_assert(STAGES > 1, "a stage is given back when the products of the next one have begun");

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int SUMS = TILE_N / 2;   // accumulators of a thread
constexpr int RASTER_ROWS = 16;    // tile rows walked together, so that operands stay in L2

constexpr int A_COPY = TILE_M * DEPTH * 2, B_COPY = TILE_N * DEPTH * 2;
constexpr int A_BYTES = COPIES * A_COPY, B_BYTES = COPIES * B_COPY;
constexpr int STAGE_BYTES = (RESIDENT > 0 ? 0 : A_BYTES) + B_BYTES;

// Begins the barriers of stages, and those of the PointInfo of tiles, for each of which `informers`
// arrive. By one thread.
template <class Shared>
__device__ __forceinline__ void begin_barriers(const Shared& s, int informers) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&s.full[i], 1);
        barrier_init(&s.empty[i], 4 * WARPGROUPS);
    }
    for (int i = 0; i < INFOS; ++i) {
        barrier_init(&s.info_full[i], informers);
        barrier_init(&s.info_empty[i], 4 * WARPGROUPS);
    }
}
