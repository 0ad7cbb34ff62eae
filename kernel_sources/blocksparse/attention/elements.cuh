// What generated scores and masks are made of beside common/math.cuh and whole numbers: elements of
// captured tensors.
#pragma once

#include "blocksparse/attention/tanh.cuh"
#include "common/whole_numbers.cuh"

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
