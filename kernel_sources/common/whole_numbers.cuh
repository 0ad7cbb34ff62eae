// Whole numbers of expressions, beside the functions of common/math.cuh, and signs.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ int absolute(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ i64 absolute(i64 x) { return x < 0 ? -x : x; }
__device__ __forceinline__ int maximum(int x, int y) { return x > y ? x : y; }
__device__ __forceinline__ i64 maximum(i64 x, i64 y) { return x > y ? x : y; }
__device__ __forceinline__ int minimum(int x, int y) { return x < y ? x : y; }
__device__ __forceinline__ i64 minimum(i64 x, i64 y) { return x < y ? x : y; }

// 1, 0 or -1; of a NaN that.
template <class T>
__device__ __forceinline__ T sign_of(T x) {
    return x > T(0) ? T(1) : (x < T(0) ? T(-1) : x);
}

// Python's // and %, of whole numbers: the rest has the divisor's sign. By 0 both are 0, and by -1
// the least number, whose quotient no integer holds, does not trap.
template <class T>
__device__ __forceinline__ T floor_quotient(T x, T y) {
    if (y == T(0)) return T(0);
    if (y == T(-1)) return T(0) - x;
    T quotient = x / y;
    return quotient * y != x && (x < T(0)) != (y < T(0)) ? quotient - T(1) : quotient;
}
template <class T>
__device__ __forceinline__ T floor_rest(T x, T y) {
    if (y == T(0) || y == T(-1)) return T(0);
    T rest = x % y;
    return rest != T(0) && (rest < T(0)) != (y < T(0)) ? rest + y : rest;
}
