// A block of a product, or of the gradient of one: one producer thread fills stages, and WARPGROUPS
// warpgroups have 64 rows each.
#pragma once

#include "common/hopper.cuh"
#include "pairwise/product/parameters.cuh"

constexpr int WARPGROUPS = Config::WARPGROUPS;
constexpr int STAGES = Config::STAGES;  // in shared memory
constexpr int COPIES = Config::COPIES;  // 2 for high and low words of values and points, else 1
constexpr int TILE_M = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int BARRIERS = 2 * STAGES + 1;
// Registers of a thread.
constexpr int OF_PRODUCERS = WARPGROUPS == 2 ? 40 : WARPGROUPS == 3 ? 32 : 24;
constexpr int OF_CONSUMERS = WARPGROUPS == 2 ? 232 : WARPGROUPS == 3 ? 160 : 112;

struct Shared {
    unsigned char *resident, *stages;
    u64 *full, *empty, *resident_full;
};

// By one thread.
__device__ __forceinline__ void begin_barriers(const Shared& s) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(&s.full[i], 1);
        barrier_init(&s.empty[i], 4 * WARPGROUPS);
    }
    barrier_init(s.resident_full, 1);
    fence_barrier_init();
}
