// out[n, r] = Finish(sum_i sums[i][n][r]): what several parts of a matrix's columns add up to, in
// their order, behind any of the sparse products. A thread a row.
//
// Floor: 4 * parts bytes of L2 an element, some microseconds with the launch. It begins while the
// product still runs, where that permits it.
//
// The generated source defines before it includes this file:
//   InputT, OutputT, AccT, VECTORS, SCALARS, EPILOGUE, Finish
//   OVERLAPS               1 for a launch that may overlap the one before (sm_90 and later)
//   PARAMETER_BYTES        Parameters as lowering lays them out
#pragma once

#include "common/hopper.cuh"
#include "common/parameters.cuh"

struct Pointers {
    const float* sums;
    OutputT* out;
};

struct Fixed {
    i64 rows, part_stride, out_vector_stride, out_row_stride;
    int columns, parts;
};

// Laid out by kernlib/families/sparse/lowering/sum.py.
struct Parameters : Pointers, VectorPointers<VECTORS>, Scalars<SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void sparse_sum(const __grid_constant__ Parameters p) {
    i64 row = i64(blockIdx.x) * blockDim.x + threadIdx.x;
#if OVERLAPS
    wait_for_prerequisites();
#endif
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
