// Entries of matrices from device memory.
#pragma once

#include "kronecker_product/modes/parameters.cuh"

using Rows = Config::Rows;      // Sizes of all factors
using Widths = Config::Widths;

// An entry of a mode's matrix, the product of its factors' entries; zero beside the matrix, where
// the first entry is read: of many entries none waits in a branch of its own for the one before.
template <class M, class T = AccT>
__device__ __forceinline__ T entry_of(const Parameters& p, i64 batch, int row, int column) {
    const bool exists = row < M::P && column < M::Q;
    row = exists ? row : 0;
    column = exists ? column : 0;
    T value = 1;
#pragma unroll
    for (int part = M::FIRST + M::PARTS - 1; part >= M::FIRST; --part) {
        const Matrix& m = p.matrices[part];
        value *= convert<AccT>(p.factors[part][batch * m.batch_stride +
                                               row % Rows::at(part) * m.row_stride +
                                               column % Widths::at(part) * m.column_stride]);
        row /= Rows::at(part);
        column /= Widths::at(part);
    }
    return exists ? value : T(0);
}

// Entries of one column of a mode's matrix, from a row on, all of which exist if the column does.
template <class M>
struct Entries {
    const Parameters& p;
    i64 batch;
    int row, column;
    const InputT* from;  // of the only factor
    __device__ __forceinline__ Entries(const Parameters& p, i64 batch, int row, int column)
        : p(p), batch(batch), row(row), column(column), from(nullptr) {
        const Matrix& m = p.matrices[M::FIRST];
        if (M::PARTS == 1 && column < M::Q)
            from = p.factors[M::FIRST] + batch * m.batch_stride + column * m.column_stride +
                   row * m.row_stride;
    }
    // So many rows on, as many for a whole warp.
    __device__ __forceinline__ AccT of(int own) const {
        if constexpr (M::PARTS > 1) {
            return entry_of<M>(p, batch, row + own, column);
        } else {
            return from ? convert<AccT>(from[own * p.matrices[M::FIRST].row_stride]) : AccT(0);
        }
    }
};
