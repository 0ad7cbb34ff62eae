// Slopes and weights as fragments of tensor cores, in parts that add up to what FP32 lanes
// multiply.
//
// A sign is exact in one bfloat16, and a weight in three, each the upper bits of what the last one
// left. Other slopes and their weights are two TF32 numbers each, of which three products count:
// less than 2^-20 of a term is lost. (Two bfloat16 parts of each lost up to 2^-15.) Parts are cut
// off, so that none is infinite where the whole is not. Only the upper TF32 part of a weight is
// rounded (to infinity above 3.401e38), as the product of both lower parts has either sign then,
// not that of the term.
//
// Of 16 points a lane holds four neighbouring ones, 4t to 4t + 3 for t = lane % 4, in place of
// 2t, 2t + 1, 2t + 8, 2t + 9 (bfloat16) or t, t + 4, t + 8, t + 12 (TF32) of common/mma.cuh. The
// sum over points is the same as long as both factors agree, and its four are one 16-byte read.
#pragma once

#include "common/mma.cuh"

// What the upper bits of a float leave of it: a NaN of an infinity.
__device__ __forceinline__ float left_of(float whole, u32 upper) {
    return whole - __uint_as_float(upper);
}

// The upper halves of two floats, which are bfloat16, the first one in the lower half. The floats
// are left with what is missing.
__device__ __forceinline__ u32 cut(float& first, float& second) {
    u32 x = __float_as_uint(first), y = __float_as_uint(second);
    first = left_of(first, x & 0xffff0000u);
    second = left_of(second, y & 0xffff0000u);
    return __byte_perm(x, y, 0x7632);
}

// The upper 19 bits of a float, all that a tensor core reads of TF32.
__device__ __forceinline__ u32 upper_bits(float x) { return __float_as_uint(x) & 0xffffe000u; }

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

// Four points of one column of weights: parts, each of pairs of points or (TF32) of points.
template <bool SIGN>
struct Terms;

template <>
struct Terms<true> {
    static constexpr int PARTS = 3, WORDS = 2;
    u32 part[PARTS][WORDS];
    __device__ __forceinline__ explicit Terms(float (&value)[4]) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            part[i][0] = cut(value[0], value[1]);
            part[i][1] = cut(value[2], value[3]);
        }
    }
};

template <>
struct Terms<false> {
    static constexpr int PARTS = 2, WORDS = 4;
    u32 part[PARTS][WORDS];
    __device__ __forceinline__ explicit Terms(const float (&value)[4]) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            part[0][i] = round_to_tf32(__float_as_uint(value[i]));
            part[1][i] = __float_as_uint(left_of(value[i], part[0][i]));
        }
    }
};
