// Elementary functions for values that are summed as soon as they are there: one special-function
// instruction where the accurate ones of float take six to ten.
//
// exp(s) inherits the rounding of s, a relative error of |s| * 2^-24, from the sum before it; the
// error of the product s * log2(e) is no larger, and that of the instruction is 2^-22.
#pragma once

#include "common/math.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

// 2^x, 0 where that is denormal.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// constant * log2(e), finite if the constant is: a tiny bandwidth's reciprocal times a distance of
// 0 stays 0.
__device__ __forceinline__ float for_exp2(float constant) {
    float y = constant * LOG2_E;
    return fabsf(y) == infinity(y) && fabsf(constant) != infinity(y)
               ? copysignf(3.402823466e38f, y)
               : y;
}

// x / y in 2 ulp, 0 for y beyond 2^126.
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }

// Found before those of the language by what is declared in the same namespace.
namespace approximate {
__device__ __forceinline__ float sqrt(float x) { return fast_sqrt(x); }
}
