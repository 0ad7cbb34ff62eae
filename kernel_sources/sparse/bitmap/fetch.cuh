// A chunk brought to shared memory by the threads of a CTA, for the kernels that undo chunks.
#pragma once

#include "common/async_copy.cuh"

// That of the CTA's number. Parameters have data, its end, and offsets in 16 bytes.
template <int THREADS, class Chunk, class Parameters>
__device__ __forceinline__ void fetch(Chunk& chunk, const Parameters& p) {
    // Within data and the chunk, whatever offsets hold.
    u32 last = u32(min(i64(p.offsets[blockIdx.x + 1]), i64(p.data_end - p.data) / 16));
    u32 begin = min(p.offsets[blockIdx.x], last);
    u32 units = min(last - begin, u32(sizeof(Chunk) / 16));
    auto* to = reinterpret_cast<Vector<u32, 4>*>(&chunk);
    const unsigned char* from = p.data + i64(begin) * 16;
    for (u32 i = threadIdx.x; i < units; i += THREADS)
        copy_async<16>(to + i, from + i * 16, 16);
    wait_for_copies();
    __syncthreads();
}
