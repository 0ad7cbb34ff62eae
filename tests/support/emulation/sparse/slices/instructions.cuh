// sparse/slices/instructions.cuh of kernel_sources.
#pragma once

#include "common/types.cuh"

template <int BYTES>
void load_once(u32* to, const unsigned char* from) {
    check_alignment(from, BYTES < 16 ? BYTES : 16);
    *to = 0;
    std::memcpy(to, from, BYTES);
}
inline u32 dot_bytes(u32 a, u32 b, u32 sum) {
    for (int shift = 0; shift < 32; shift += 8) sum += (a >> shift & 255) * (b >> shift & 255);
    return sum;
}
