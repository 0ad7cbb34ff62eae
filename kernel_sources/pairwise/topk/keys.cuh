// The order of values: as float's, a NaN behind all numbers, as in torch.topk.
#pragma once

#include "common/types.cuh"

// Values are negated then, and a NaN is ahead of all numbers.
constexpr bool LARGEST = Config::LARGEST;

// A whole number for each value, in their order. 0 and -0 are equal.
__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    if (x != x) return LARGEST ? 0u : ~1u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The value of a key; a NaN for that of one, and for the largest of whole numbers.
__device__ __forceinline__ float number_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
