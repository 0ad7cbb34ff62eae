// Products of slopes and split weights by wgmma (sm_90a): slopes from registers, weights from
// shared memory, which so reach registers no more. A warpgroup has QUERIES_A_WARP queries and
// FEATURE_TILES times 64 features, 16 of them a warp. Slopes of one query are made while the tensor
// cores are at those of the last. The order of points inside a product is free, see
// gradient_fragments.cuh: one half of 16 rows is points 4t and 4t + 1, the other 4t + 2 and 4t + 3.
#pragma once

#include "common/hopper.cuh"

constexpr int TILE_STEP = 64;
// Rows of 16 bytes (8 points) of every column, for either half of 16 points, one part after the
// other.
constexpr int HALF_BYTES = COLUMNS * 16;
constexpr int TERM_BYTES = 2 * 2 * HALF_BYTES;  // of a query and a step
constexpr int TERMS = QUERIES * STEPS * TERM_BYTES;
static_assert(WARPS_K % 4 == 0, "whole warpgroups");
static_assert(!SINGLE, "of one coefficient mma.sync's products are as fast");

struct Place {
    int q, k, row, column;
    __device__ __forceinline__ Place() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        q = warp / WARPS_K * QUERIES_A_WARP;
        k = warp % WARPS_K / 4 * FEATURE_TILES * 64 + warp % 4 * 16;
        row = lane / 4;
        column = lane % 4;
    }
};

__device__ __forceinline__ void store_terms(unsigned char* terms, int place, int o, int quad,
                                            const TwoTerms& made) {
    u32* to = reinterpret_cast<u32*>(terms + place * TERM_BYTES) + o * 4 + quad;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        to[half * HALF_BYTES / 4] = made.high[half];
        to[(2 + half) * HALF_BYTES / 4] = made.low[half];
    }
}

// Before the barrier behind which terms are read.
__device__ __forceinline__ void publish_terms() { fence_shared_writes(); }

// The products of one query.
__device__ __forceinline__ void multiply(float (&sums)[COLUMN_TILES][4], const Slopes& slopes,
                                         u32 high) {
    u32 low = high + 2 * HALF_BYTES / 16;
    if (!Slope::SIGN) multiply_64(sums, slopes.low, high);
    multiply_64(sums, slopes.high, low);
    multiply_64(sums, slopes.high, high);
}

__device__ __forceinline__ void add_stage(Sums& sums, const Coordinates& x, const float* raw,
                                          const unsigned char* terms, const Place& place,
                                          const Exponents& exponents) {
    constexpr int NEXT = STEPS * TERM_BYTES / 16;  // to the next query's
    u32 weights = (shared_address(terms) + place.q * STEPS * TERM_BYTES) >> 4 | HALF_BYTES << 12;
    weights = __shfl_sync(~0u, weights, 0);  // for ptxas: the same in all lanes
    const float* points = raw + (place.k + place.row) * 16 + place.column * 4;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
            Points z(points + f * TILE_STEP * 16);
#pragma unroll
            for (int q = 0; q < QUERIES_A_WARP; q += TOGETHER) {
                Slopes slopes[TOGETHER];
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) slopes[i].make(x[q + i][f], z, exponents);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < TOGETHER; ++i) {
                    multiply(sums[q + i][f], slopes[i], weights + (q + i) * NEXT);
                }
                wgmma_commit();
                wgmma_wait<1>();  // the last ones' slopes are free
            }
        }
        points += FEATURES * 16;
        weights += TERM_BYTES / 16;
    }
    wgmma_wait<0>();
}
