// What kernels that reduce a matrix over n are launched with, and which part of it a block has.
//
// The generated source defines before it includes this file:
//   InputT, AccT   storage of a, b and v; arithmetic: float or double
//   SCALARS        count of hyperparameters
#pragma once

#include "pairwise/scalars.cuh"

// Laid out by kernlib/families/pairwise/lowering/reduce.py.
struct Parameters {
    // written at each launch
    const InputT* a;
    const InputT* b;
    const InputT* v;
    AccT* out;
    i64* indices;
    Scalar scalars[SCALARS];
    // fixed by the plan
    i64 scalar_strides[SCALARS];
    View a_view, b_view, v_view;  // (batch, point, feature) of a and b, (batch, n, column) of v
    i64 m, n, batch;
    i64 diagonal;                 // n - m of the entries that receive the regularization
    i64 per_split;                // n of a block, less for the last one
    int k, row_blocks;
    int columns, out_columns;     // of v that exist here, and of a row of out
};

using ReadScalar = ScalarReader<Parameters>;

// The part of one block.
struct Part {
    i64 m0, first, last;  // its first row, its n from first on
    int split;

    __device__ __forceinline__ Part(const Parameters& parameters, i64 m0, int split)
        : m0(m0), first(split * parameters.per_split),
          last(min(first + parameters.per_split, parameters.n)), split(split) {}

    __device__ __forceinline__ Part(const Parameters& parameters, int rows)
        : Part(parameters, i64(blockIdx.x % parameters.row_blocks) * rows,
               int(blockIdx.x / parameters.row_blocks)) {}
};
