// Rows of a warp's sums of wgmma to device memory, 16 bytes a lane.
#pragma once

#include "common/hopper.cuh"
#include "common/mma_half.cuh"

using InputT = Config::InputT;

// Of a matrix of words, of which the four lanes of a row have a column each, a row each.
__device__ __forceinline__ void turn(u32 (&words)[4]) {
    int lane = threadIdx.x % 4;
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2) {
        bool upper = lane & apart;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & apart) continue;
            u32 &low = words[i], &high = words[i + apart];
            u32 other = __shfl_xor_sync(~0u, upper ? low : high, apart);
            if (upper) low = other;
            else high = other;
        }
    }
}

// Row h of a thread's two, times a factor, or zeros whatever its sums are. Of it `width` elements
// exist, a multiple of 8. All lanes call, also for a row that does not exist.
template <int SUMS>
__device__ __forceinline__ void store_row(const float (&sums)[SUMS], int h, InputT* to, bool exists,
                                          int width, float factor, bool zeros = false) {
#pragma unroll
    for (int first = 0; first < SUMS / 4; first += 4) {
        u32 words[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first + i >= SUMS / 4) break;
            const float* pair = sums + 4 * (first + i) + 2 * h;
            words[i] = zeros ? 0 : pack<InputT>(pair[0] * factor, pair[1] * factor);
        }
        turn(words);
        int column = (first + int(threadIdx.x) % 4) * 8;
        if (!exists || column >= width) continue;
        store_vector(reinterpret_cast<u32*>(to + column),
                     Vector<u32, 4>{words[0], words[1], words[2], words[3]});
    }
}
