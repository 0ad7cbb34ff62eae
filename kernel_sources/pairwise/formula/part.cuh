// Reductions over the columns of a matrix of scores that is never stored: the part of a block, and
// where its results go.
//
// The columns of a row are divided among `splits` blocks, so that few rows fill a GPU too. Each
// leaves a partial result, (splits, batch, rows, features) in all, which formula/join.cuh puts
// together in one order: no atomics, the same bits each time. A block has WIDTH features of a unit.
#pragma once

#include "common/reducers.cuh"
#include "pairwise/formula/formula.cuh"
#include "pairwise/formula/log_sums.cuh"

using Reducer = Config::Reducer;  // a struct of reducers.cuh, or LogSums

constexpr int NOWHERE = 0x7fffffff;  // the place of a minimum of no columns
constexpr i64 NO_COLUMN = 0x7fffffffffffffffll;

struct Part {
    i64 m0, first, last;  // its first row, its columns
    int split, chunk;

    __device__ __forceinline__ Part(const Parameters& call, int rows) {
        u32 index = blockIdx.x, blocks = call.row_blocks, splits = call.splits;
        m0 = i64(index % blocks) * rows;
        split = int(index / blocks % splits);
        chunk = int(index / blocks / splits);
        first = split * call.per_split;
        last = min(first + call.per_split, i64(call.cols));
    }
};

// A reducer of a row with these columns, in a block whose columns begin at `from`.
__device__ __forceinline__ Reducer reducer_of(const Columns& columns, i64 from) {
    return Reducer(columns.first < columns.last ? int(columns.first - from) : NOWHERE);
}

// Stores COUNT results of a row, from feature f0 on.
__device__ __forceinline__ void store_row(const Reducer& reducer, const Parameters& call,
                                          const Part& part, i64 l, i64 m, int f0) {
    if (m >= call.rows) return;
    i64 row = (part.split * call.batch + l) * call.rows + m;
    AccT* out = call.out + row * call.features;
#pragma unroll
    for (int c = 0; c < Reducer::OUTPUTS; ++c) {
        if (f0 + c < call.features) out[f0 + c] = reducer.output(c);
    }
    if (Reducer::INDEXED) {
        bool exists = reducer.index() != NOWHERE;
        i64 none = call.splits > 1 ? NO_COLUMN : 0;
        call.indices[row] = exists ? part.first + reducer.index() : none;
    }
}

// The least first and the greatest end of the columns of a block's threads.
template <int THREADS>
__device__ __forceinline__ Columns columns_of_block(int first, int last, int* shared) {
    constexpr int WARPS = THREADS / 32;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        first = min(first, __shfl_xor_sync(0xffffffffu, first, mask));
        last = max(last, __shfl_xor_sync(0xffffffffu, last, mask));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        shared[threadIdx.x / 32] = first;
        shared[WARPS + threadIdx.x / 32] = last;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        first = min(first, shared[warp]);
        last = max(last, shared[WARPS + warp]);
    }
    return {first, last};
}
