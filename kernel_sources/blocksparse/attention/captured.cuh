// What generated scores are made of: captured tensors, and the score that there is without a text.
#pragma once

#include "blocksparse/attention/strides.cuh"

struct Captured {
    const void* at;
    i64 batch, head, row, col;

    template <class T>
    __device__ __forceinline__ const T* from(int of_batch, int of_head) const {
        return static_cast<const T*>(at) + of_batch * batch + of_head * head;
    }
};

// What becomes of nothing.
struct PlainScore {
    __device__ __forceinline__ PlainScore(const Captured*, int, int) {}
    __device__ __forceinline__ float operator()(float v, int, int) const { return v; }
    __device__ __forceinline__ float slope(float, int, int) const { return 1.0f; }
    __device__ __forceinline__ bool keeps(int, int) const { return true; }
    template <int K>
    __device__ __forceinline__ float slope_of(float, int, int) const { return 0.0f; }
};
