// A dense matrix read in chunks of 16 rows x 256 columns, zeros beyond its edges.
#pragma once

#include "sparse/bitmap/layout.cuh"

// Of a value's bits: whether it is neither 0.0 nor -0.0.
__device__ __forceinline__ bool is_entry(BitsT bits) { return BitsT(bits << 1) != 0; }

// Of parameters that have dense, whose columns lie side by side, rows, cols, row_stride, and
// vectors: whether rows take aligned 16-byte loads.
template <class P>
__device__ __forceinline__ Piece read_piece(const P& p, i64 row, i64 column) {
    Piece x = {};
    if (row >= p.rows || column >= p.cols) return x;
    const BitsT* from = p.dense + row * p.row_stride + column;
    if (p.vectors && column + WIDTH <= p.cols) {
#pragma unroll
        for (int i = 0; i < WIDTH / PER_ACCESS; ++i)
            x.part[i] = load_vector<BitsT, PER_ACCESS>(from + i * PER_ACCESS);
    } else {
#pragma unroll
        for (int e = 0; e < WIDTH; ++e)
            if (column + e < p.cols) x[e] = from[e];
    }
    return x;
}

// Of the rows that a warp reads at once. Where none lies beyond an edge nothing branches, so that
// all loads are on their way before the first is used.
template <class P, int N>
__device__ __forceinline__ void read_pieces(const P& p, i64 row, i64 chunk_column,
                                            Piece (&x)[N]) {
    i64 column = chunk_column + threadIdx.x % 32 * WIDTH;
    if (p.vectors && row + N <= p.rows && chunk_column + CHUNK_COLUMNS <= p.cols) {
        const BitsT* from = p.dense + row * p.row_stride + column;
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < WIDTH / PER_ACCESS; ++i)
                x[n].part[i] =
                    load_vector<BitsT, PER_ACCESS>(from + n * p.row_stride + i * PER_ACCESS);
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = read_piece(p, row + n, column);
    }
}
