// What generated scores and masks are made of beside common/math.cuh: elements of captured tensors
// and whole numbers.
#pragma once

#include "blocksparse/attention/tanh.cuh"

// An element of what nothing writes while a kernel runs: the same one is read once, wherever it
// stands.
__device__ __forceinline__ float captured_value(const float* at) { return __ldg(at); }
__device__ __forceinline__ int captured_value(const int* at) { return __ldg(at); }
__device__ __forceinline__ i64 captured_value(const i64* at) { return __ldg(at); }
__device__ __forceinline__ bool captured_value(const unsigned char* at) { return __ldg(at) != 0; }
__device__ __forceinline__ float captured_value(const half_t* at) {
    return convert<float>(half_t{__ldg(reinterpret_cast<const u16*>(at))});
}
__device__ __forceinline__ float captured_value(const bfloat16_t* at) {
    return convert<float>(bfloat16_t{__ldg(reinterpret_cast<const u16*>(at))});
}

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
