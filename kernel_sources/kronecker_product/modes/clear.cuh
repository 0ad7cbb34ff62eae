// Zeros, for the counters of slabs.cuh.
//
// Facts and struct Fixed: class Clear of kernlib/families/kronecker_product/kernels/clear.py.
#pragma once

#include "common/types.cuh"

constexpr int THREADS = Config::THREADS;

struct Pointers {
    u32* counters;
};

struct Parameters : Pointers, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_product_clear(const __grid_constant__ Parameters p) {
    i64 index = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (index < p.count) p.counters[index] = 0;
}
