// The gate of a kernel that has something to do only where more than LIMIT of the pairs that were
// sampled are doubtful (split/parameters.cuh); 0 is a kernel without one.
#pragma once

#include "common/types.cuh"

template <int LIMIT>
struct BehindGate {
    const u32* gate;
    __device__ __forceinline__ bool is_needed() const { return *gate > LIMIT; }
};
template <>
struct BehindGate<0> {
    __device__ __forceinline__ bool is_needed() const { return true; }
};
