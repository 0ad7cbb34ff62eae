// out[n, r] = Finish(sum_i sums[i][n][r]): what several parts of a matrix's columns add up to, in
// their order, behind any of the sparse products. A thread a row.
//
// Floor: 4 * parts bytes of L2 an element, some microseconds with the launch. It begins while the
// product still runs, where that permits it.
//
// Facts and struct Fixed: class Sum of kernlib/families/sparse/kernels/sum.py.
#pragma once

#include "common/hopper.cuh"
#include "common/parameters.cuh"

using OutputT = Config::OutputT;  // storage of out

struct Pointers {
    const float* sums;
    OutputT* out;
};

struct Parameters : Pointers,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void sparse_sum(const __grid_constant__ Parameters p) {
    i64 row = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if constexpr (Config::OVERLAPS) wait_for_prerequisites();
    if (row >= p.rows) return;
    Finish finish(Read<Parameters>{p});
    for (int n = blockIdx.y; n < p.columns; n += gridDim.y) {
        const float* from = p.sums + n * p.rows + row;
        float sum = 0;
#pragma unroll 4
        for (int i = 0; i < p.parts; ++i) sum += from[i * p.part_stride];
        p.out[n * p.out_vector_stride + row * p.out_row_stride] =
            convert<OutputT>(finish(sum, row));
    }
}
