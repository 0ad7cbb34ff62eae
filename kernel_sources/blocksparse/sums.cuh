// Sums over the lanes of a warp and the threads of a block, up to each of them.
#pragma once

#include "common/types.cuh"

constexpr u32 ALL_LANES = ~0u;

// The sum over lanes up to this one.
__device__ __forceinline__ u32 sum_of_lanes(u32 own) {
    u32 lane = threadIdx.x % 32, sum = own;
#pragma unroll
    for (u32 apart = 1; apart < 32; apart *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, sum, apart);
        if (lane >= apart) sum += other;
    }
    return sum;
}

// The sum over the block's threads ahead of this one, and that over all. `sums` has a place for
// each warp; nobody may still read what it held.
template <int WARPS>
__device__ __forceinline__ u32 sum_ahead(u32 own, u32* sums, u32& total) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 sum = sum_of_lanes(own);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    u32 of_warps = sum_of_lanes(lane < WARPS ? sums[lane] : 0);
    total = __shfl_sync(ALL_LANES, of_warps, 31);
    u32 before = __shfl_sync(ALL_LANES, of_warps, warp - 1);
    return sum - own + (warp ? before : 0);
}
