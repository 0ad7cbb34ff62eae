// out[i,l,r,s] = sum over splits, in order, of partial[split,i,l,r,s]: the same bits at every run.
//
// Floor: splits * a*b*c*d * 4 bytes over the bandwidth of L2, where portable/portable.cuh or
// hopper/hopper.cuh has left them.
//
// The generated source defines before it includes this file:
//   OutputT            storage of out
//   PARAMETER_BYTES    what lowering makes of Parameters
#pragma once

#include "common/types.cuh"

constexpr int THREADS = 256;
constexpr int RUN = 4;  // columns of a thread

// Laid out by kernlib/families/kronecker_sparse/lowering/portable.py.
struct Parameters {
    // written at each launch
    const float* partial;  // (split, block, lane, row, column), columns padded to a multiple of RUN
    OutputT* out;
    // fixed by the plan
    i64 out_block_stride, out_lane_stride, out_row_stride, out_column_stride;
    i64 split_stride;
    u32 splits, lanes, rows, columns;
    u32 runs, total;       // of RUN columns, in a row and in all
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
kronecker_sparse_split_k_sum(const __grid_constant__ Parameters p) {
    u32 index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= p.total) return;
    // Neighbouring threads take neighbouring l, as they lie in a weight: written apart, each number
    // of a weight with d = 16 would be a sector of 32 bytes.
    u32 lane = index % p.lanes, run = index / p.lanes % p.runs, line = index / p.lanes / p.runs;
    u32 row = line % p.rows, block = line / p.rows, column = run * RUN;
    i64 place = (i64(block * p.lanes + lane) * p.rows + row) * p.runs + run;
    const float* from = p.partial + place * RUN;
    Vector<float, RUN> sum = {};
#pragma unroll 8
    for (u32 split = 0; split < p.splits; ++split, from += p.split_stride) {
        auto part = load_vector<float, RUN>(from);
#pragma unroll
        for (int e = 0; e < RUN; ++e) sum.element[e] += part.element[e];
    }
    OutputT* to = p.out + block * p.out_block_stride + lane * p.out_lane_stride +
                  row * p.out_row_stride + column * p.out_column_stride;
#pragma unroll
    for (int e = 0; e < RUN; ++e) {
        if (column + e < p.columns) to[e * p.out_column_stride] = convert<OutputT>(sum.element[e]);
    }
}
