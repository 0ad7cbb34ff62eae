// Numbers of fp32 as two half-precision ones.
#pragma once

#include "common/mma_half.cuh"

// Two numbers, the first in the lower half: the nearest, and what is left.
struct Pair {
    u32 high, low;
    __device__ __forceinline__ Pair(float first, float second) {
        high = pack<half_t>(first, second);
        low = pack<half_t>(first - convert<float>(half_t{u16(high)}),
                           second - convert<float>(half_t{u16(high >> 16)}));
    }
};
