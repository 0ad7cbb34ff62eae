// Zeros in the slots behind the stored blocks, for kernels that write the stored ones alone.
#pragma once

#include "common/types.cuh"

// WARPS warps of each CTA share them. Of p are counts, the first of which is how many slots hold a
// block of BLOCK x BLOCK, capacity, batch, out and batch_step, from one batch's values to the next.
template <int BLOCK, int WARPS, class P>
__device__ __forceinline__ void clear_rest(const P& p) {
    constexpr int CHUNK = 16 / sizeof(*p.out), SIZE = BLOCK * BLOCK;
    int lane = threadIdx.x % 32;
    i64 first = i64(p.counts[0]) + blockIdx.x * WARPS + threadIdx.x / 32;
#pragma unroll 1
    for (i64 slot = first; slot < p.capacity; slot += gridDim.x * WARPS) {
#pragma unroll 1
        for (int batch = 0; batch < p.batch; ++batch) {
            auto* to = p.out + batch * p.batch_step + slot * SIZE;
#pragma unroll 1
            for (int chunk = lane; chunk < SIZE / CHUNK; chunk += 32)
                store_vector(reinterpret_cast<u32*>(to + chunk * CHUNK), Vector<u32, 4>{});
        }
    }
}
