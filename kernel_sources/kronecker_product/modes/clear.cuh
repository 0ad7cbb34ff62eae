// Zeros, for the counters of slabs.cuh.
#pragma once

#include "common/types.cuh"

struct Parameters {
    u32* counters;
    i64 count;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_product_clear(const __grid_constant__ Parameters p) {
    i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (index < p.count) p.counters[index] = 0;
}
