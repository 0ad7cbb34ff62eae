// common/mma_half.cuh of kernel_sources.
#pragma once

#include "common/mma.cuh"

template <class T>
inline void multiply_short_fragments(float (&d)[4], u32 a0, u32 a1, u32 b) {
    u32 a[2] = {a0, a1};
    multiply_halves<T>(d, a, &b, 8);
}

template <class T>
inline void first_products(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    for (float& value : d) value = 0;
    multiply_fragments<T>(d, a, b);
}
template <class T>
inline void first_short_products(float (&d)[4], u32 a0, u32 a1, u32 b) {
    for (float& value : d) value = 0;
    multiply_short_fragments<T>(d, a0, a1, b);
}

inline u32 transpose_matrix(u32 x) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    words_of_lanes[warp][lane][0] = x;
    wait_for_warp();
    u32 y = 0;
    for (int k = 0; k < 2; ++k) {
        int row = lane % 4 * 2 + k, column = lane / 4;
        u32 word = words_of_lanes[warp][row * 4 + column / 2][0];
        y |= (word >> 16 * (column % 2) & 0xffffu) << 16 * k;
    }
    wait_for_warp();
    return y;
}

template <class T>
inline u32 pack(float first, float second) {
    return convert<T>(first).bits | u32(convert<T>(second).bits) << 16;
}
