// Zeros in the slots behind the stored blocks, for kernels that write the stored ones alone.
//
// The file that includes this one defines before: BLOCK, rows and columns of a block; WARPS, of a
// CTA, that call this; and Parameters with counts, of which the first is how many slots hold a
// block, capacity, batch, out and batch_step, elements from one batch's to the next.
#pragma once

#include "common/types.cuh"

// The warps of all CTAs share them.
__device__ __forceinline__ void clear_rest(const Parameters& p) {
    constexpr int CHUNK = 16 / sizeof(OutputT), SIZE = BLOCK * BLOCK;
    int lane = threadIdx.x % 32;
    i64 first = i64(p.counts[0]) + blockIdx.x * WARPS + threadIdx.x / 32;
#pragma unroll 1
    for (i64 slot = first; slot < p.capacity; slot += gridDim.x * WARPS) {
#pragma unroll 1
        for (int batch = 0; batch < p.batch; ++batch) {
            OutputT* to = p.out + batch * p.batch_step + slot * SIZE;
#pragma unroll 1
            for (int chunk = lane; chunk < SIZE / CHUNK; chunk += 32)
                store_vector(reinterpret_cast<u32*>(to + chunk * CHUNK), Vector<u32, 4>{});
        }
    }
}
