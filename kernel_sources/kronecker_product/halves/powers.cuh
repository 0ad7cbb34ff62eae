// Powers of two as float, and their exponents.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ int exponent_of(float x) { return int(__float_as_uint(x) >> 23) - 127; }

// The nearest there is among normal numbers.
__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(u32(max(-126, min(exponent, 127)) + 127) << 23);
}

// Two that make a power which need not be a number itself.
__device__ __forceinline__ Vector<float, 2> powers_of_two(int exponent) {
    int half = exponent / 2;
    return {power_of_two(half), power_of_two(exponent - half)};
}
