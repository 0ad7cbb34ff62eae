// sparse/slices/dot.cuh of kernel_sources.
#pragma once

#include "common/types.cuh"

inline u32 dot_bytes(u32 a, u32 b, u32 sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 255) * (b >> shift & 255);
    return sum;
}
