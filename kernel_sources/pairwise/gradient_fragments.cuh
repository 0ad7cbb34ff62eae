// Slopes and weights as bfloat16 fragments of tensor cores.
//
// A float is the sum of a high and a low bfloat16 to 2^-17 of it, of three to all its bits. The
// sign of a difference is exact in one. Of 16 points a lane holds four neighbouring ones, 4t to
// 4t + 3 for t = lane % 4, in place of the 2t, 2t + 1, 2t + 8, 2t + 9 of common/mma.cuh. The sum
// over points is the same as long as both factors agree, and its four are one 16-byte read.
#pragma once

#include "common/mma.cuh"

// Two floats rounded to bfloat16, the first one in the lower half.
__device__ __forceinline__ u32 pack(float first, float second) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
    return y;
}
__device__ __forceinline__ float lower(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float upper(u32 x) { return __uint_as_float(x & 0xffff0000u); }

// The high parts of two floats, which are left with what is missing.
__device__ __forceinline__ u32 split(float& first, float& second) {
    u32 high = pack(first, second);
    first -= lower(high);
    second -= upper(high);
    return high;
}

// The signs of two floats: 1, -1 or (for a zero of either sign) 0, and 1 or -1 for a NaN. The
// upper half of a float is one of bfloat16, which is 0 for those below 2^-133 alone.
__device__ __forceinline__ u32 signs(float first, float second) {
    u32 upper = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632), one;
#if __CUDA_ARCH__ >= 900
    asm("set.neu.bf16x2.bf16x2 %0, %1, %2;" : "=r"(one) : "r"(upper), "r"(0));
#else
    // min(2^127 |v|, 1), a NaN becoming 1
    asm("{\n\t"
        ".reg .b32 t;\n\t"
        "fma.rn.bf16x2 t, %1, %2, %3;\n\t"
        "abs.bf16x2 t, t;\n\t"
        "min.bf16x2 %0, t, %4;\n\t"
        "}"
        : "=r"(one)
        : "r"(upper), "r"(0x7f007f00), "r"(0x80008000), "r"(0x3f803f80));
#endif
    return (upper & 0x80008000u) | one;
}

// Four points of one column of weights: high and low parts.
struct alignas(16) TwoTerms {
    u32 high[2], low[2];
};
__device__ __forceinline__ TwoTerms two_terms(float (&value)[4]) {
    TwoTerms made;
    made.high[0] = split(value[0], value[1]);
    made.high[1] = split(value[2], value[3]);
    made.low[0] = pack(value[0], value[1]);
    made.low[1] = pack(value[2], value[3]);
    return made;
}
