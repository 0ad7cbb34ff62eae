// Products of slopes and split weights by wgmma (sm_90a): slopes from registers, weights from
// shared memory, which so reach registers no more. A warpgroup has QUERIES_A_WARP queries and
// FEATURE_TILES times 64 features, 16 of them a warp. Slopes of one query are made while the tensor
// cores are at those of the last. The order of points inside a product is free, see
// gradient/fragments.cuh: of 16 bfloat16 rows one half is points 4t and 4t + 1, the other 4t + 2
// and 4t + 3; of 8 TF32 rows one half is points 4t (or 4t + 2), the other the next ones.
//
// Facts, structs OutView and Fixed and multiply_64(), one wgmma: class TensorWgmma of
// kernlib/families/pairwise/kernels/gradient_tensor.py.
#pragma once

#include "common/hopper.cuh"
#include "pairwise/gradient/tensor.cuh"

// Rows of 16 bytes of every column for either half of a product's rows, one part after the other.
constexpr int HALF_BYTES = COLUMNS * 16;
constexpr int PART_BYTES = Parts::WORDS * HALF_BYTES;
constexpr int TERM_BYTES = Parts::PARTS * PART_BYTES;  // of a query and a step
static_assert(WARPS_K % 4 == 0, "whole warpgroups");
static_assert(!SINGLE, "of one coefficient mma.sync's products are as fast");

// The products of one query and step.
template <class Made>
__device__ __forceinline__ void multiply(float (&sums)[COLUMN_TILES][4], const Made& slopes,
                                         u32 weights) {
    constexpr int PART = PART_BYTES / 16, HALF = HALF_BYTES / 16;
    if constexpr (Slope::SIGN) {
#pragma unroll
        for (int i = Parts::PARTS - 1; i >= 0; --i) {
            multiply_64(sums, slopes.high, weights + i * PART);
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 first = weights + 2 * half * HALF;
            multiply_64(sums, slopes.low[half], first);
            multiply_64(sums, slopes.high[half], first + PART);
            multiply_64(sums, slopes.high[half], first);
        }
    }
}

struct ByWgmma {
    static constexpr int TERMS = QUERIES * STEPS * TERM_BYTES;

    struct Place {
        static constexpr int STEP = 64;  // features from one tile of a warp to its next
        int q, k, row, column;
        __device__ __forceinline__ Place() {
            int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            q = warp / WARPS_K * QUERIES_A_WARP;
            k = warp % WARPS_K / 4 * FEATURE_TILES * 64 + warp % 4 * 16;
            row = lane / 4;
            column = lane % 4;
        }
    };

    static __device__ __forceinline__ void store_terms(unsigned char* terms, int place, int o,
                                                       int quad, const Parts& made) {
        u32* to = reinterpret_cast<u32*>(terms + place * TERM_BYTES) + o * 4 + quad;
#pragma unroll
        for (int i = 0; i < Parts::PARTS; ++i) {
#pragma unroll
            for (int w = 0; w < Parts::WORDS; ++w) {
                to[i * PART_BYTES / 4 + w * HALF_BYTES / 4] = made.part[i][w];
            }
        }
    }

    // Before the barrier behind which terms are read.
    static __device__ __forceinline__ void publish_terms() { fence_shared_writes(); }

    static __device__ __forceinline__ void add_stage(Sums& sums, const Coordinates& x,
                                                     const float* raw, const unsigned char* terms,
                                                     const Place& place,
                                                     const Numbers& exponents) {
        constexpr int NEXT = STEPS * TERM_BYTES / 16;  // to the next query's
        u32 first = shared_address(terms) + place.q * STEPS * TERM_BYTES;
        u32 weights = first >> 4 | HALF_BYTES << 12;
        weights = __shfl_sync(~0u, weights, 0);  // for ptxas: the same in all lanes
        const float* points = raw + (place.k + place.row) * 16 + place.column * 4;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int f = 0; f < FEATURE_TILES; ++f) {
                Points z(points + f * Place::STEP * 16);
#pragma unroll
                for (int q = 0; q < QUERIES_A_WARP; ++q) {
                    Slopes slopes;
                    slopes.make(x[q][f], z, exponents);
                    wgmma_fence();
                    multiply(sums[q][f], slopes, weights + q * NEXT);
                    wgmma_commit();
                    wgmma_wait<1>();  // the last one's slopes are free
                }
            }
            points += FEATURES * 16;
            weights += TERM_BYTES / 16;
        }
        wgmma_wait<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, Config::BLOCKS)
pair_gradient_tensor(const __grid_constant__ Parameters parameters) {
    sum_points<ByWgmma>(parameters);
}
