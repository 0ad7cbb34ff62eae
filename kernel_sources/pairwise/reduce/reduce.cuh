// Reductions over n of Epilogue(Outer(sum_k Inner(Op(a[l,m,k], b[l,n,k])))), a matrix that is never
// stored: what reduce/small.cuh and reduce/tile.cuh share.
//
// The n of a row are divided among `splits` blocks, so that few rows fill a GPU too. Each writes
// one partial result, (splits, batch, M, out_columns) in all, which are put together afterwards in
// one order: no atomics, the same bits each time.
//
// Facts: kernlib/families/pairwise/kernels/reduce.py. Finish is Outer and Epilogue of one sum; its
// constructor reads hyperparameters.
#pragma once

#include "pairwise/mend.cuh"
#include "pairwise/reduce/parameters.cuh"
#include "common/reducers.cuh"

using Reducer = Config::Reducer;                   // a struct of common/reducers.cuh
constexpr bool REGULARIZED = Config::REGULARIZED;  // whether the regularization is given

constexpr int WEIGHTS = Reducer::COLUMNS > 0 ? Reducer::COLUMNS : 1;

template <bool WIDE>
struct Stored {
    using Type = InputT;
};
template <>
struct Stored<true> {
    using Type = AccT;
};
using WeightT = Stored<Reducer::WIDE>::Type;  // storage of v

__device__ __forceinline__ const WeightT* weights_of(const Parameters& parameters) {
    return reinterpret_cast<const WeightT*>(parameters.v);
}

// v[l,n,0..COLUMNS) as zeros past the last column.
__device__ __forceinline__ void read_weights(AccT* to, const Parameters& parameters, i64 l, i64 n) {
    const View& view = parameters.v_view;
    const WeightT* from = weights_of(parameters) + l * view.batch_stride + n * view.row_stride;
#pragma unroll
    for (int c = 0; c < Reducer::COLUMNS; ++c) {
        bool exists = c < parameters.columns;
        to[c] = exists ? convert<AccT>(from[c * view.column_stride]) : AccT(0);
    }
}

// n - n0 of the entry of row m that receives the regularization, cut to an int's range.
__device__ __forceinline__ int diagonal_place(const Parameters& parameters, i64 m, i64 n0) {
    return int(max(min(m + parameters.diagonal - n0, i64(1) << 30), i64(-1)));
}

// Whether the regularization waits for the end of a row, where it is one more value.
constexpr bool AT_END = REGULARIZED && Reducer::LINEAR;
constexpr bool IN_PLACE = REGULARIZED && !Reducer::LINEAR;

// The end of row m, whose n of this part have been added.
__device__ __forceinline__ void store_row(Reducer& reducer, const Parameters& parameters,
                                          const Part& part, i64 l, i64 m) {
    if (m >= parameters.m) return;
    if (AT_END) {
        i64 n = m + parameters.diagonal;
        if (n >= part.first && n < part.last) {
            AccT weights[WEIGHTS];
            read_weights(weights, parameters, l, n);
            reducer.add(ReadScalar{parameters, l}(REGULARIZATION), 0, weights);
            reducer.settle();
        }
    }
    i64 row = (part.split * parameters.batch + l) * parameters.m + m;
    AccT* out = parameters.out + row * parameters.out_columns;
#pragma unroll
    for (int c = 0; c < Reducer::OUTPUTS; ++c) {
        if (Reducer::COLUMNS == 0 || c < parameters.columns) out[c] = reducer.output(c);
    }
    if (Reducer::INDEXED) parameters.indices[row] = part.first + reducer.index();
}
