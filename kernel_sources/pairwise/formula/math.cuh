// Functions of generated formulas beside common/math.cuh: of whole numbers, and of values of pairs
// that are summed as soon as they are there.
#pragma once

#include "common/approximate.cuh"
#include "common/double_exponential.cuh"
#include "common/math.cuh"
#include "common/whole_numbers.cuh"

__device__ __forceinline__ double fast_exp(double x) { return branchless::exp(x); }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }

template <class T>
__device__ __forceinline__ T three_halves(T x) { return x * fast_sqrt(x); }

// A product that is rounded before something is added to it, as comparisons show.
__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double rounded_product(double x, double y) { return __dmul_rn(x, y); }
