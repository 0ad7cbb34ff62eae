// Matrices and tiles from device memory to shared memory.
#pragma once

#include "common/async_copy.cuh"
#include "kronecker_product/modes/multiply.cuh"
#include "kronecker_product/modes/parameters.cuh"

// The matrix of a mode, column by column: the product of its factors' entries, zeros around it.
template <class M>
__device__ __forceinline__ void stage_matrix(AccT* matrix, const Parameters& p, i64 batch) {
    for (int index = threadIdx.x; index < M::MATRIX; index += THREADS) {
        int row = index % M::DEPTH, column = index / M::DEPTH;
        AccT value = 0;
        if (row < M::P && column < M::Q) {
            value = 1;
#pragma unroll
            for (int part = M::FIRST + M::PARTS - 1; part >= M::FIRST; --part) {
                const Matrix& m = p.matrices[part];
                value *= convert<AccT>(p.factors[part][batch * m.batch_stride +
                                                       row % ROWS[part] * m.row_stride +
                                                       column % WIDTHS[part] * m.column_stride]);
                row /= ROWS[part];
                column /= WIDTHS[part];
            }
        }
        matrix[place(index)] = value;
    }
}

// Column and feature of an element of the tile that is read.
template <class R>
__device__ __forceinline__ void locate(int index, int& column, int& feature) {
    column = R::COLUMNS_LAST ? index % R::COLUMNS : index / R::IN_FEATURES;
    feature = R::COLUMNS_LAST ? index / R::COLUMNS : index % R::IN_FEATURES;
}

// What another block wrote in this launch is in the L2 cache, and may be older in that of the
// multiprocessor.
template <class R>
__device__ __forceinline__ typename R::SourceT load_element(const typename R::SourceT* from) {
    if constexpr (R::WRITTEN_HERE) return __ldcg(from);
    else return *from;
}

// Elements `begin` up to `end` of a tile, in multiples of CHUNK. Copies may be under way still.
template <class R>
__device__ __forceinline__ void load_tile(AccT* tile, const Parameters& p, const RunFixed& run,
                                          const void* source, const Tile& at, int begin, int end) {
    using SourceT = typename R::SourceT;
    constexpr int CHUNK = 16 / sizeof(SourceT);
    // Of the tile's last dimension, in which 16-byte copies run.
    constexpr int LAST = R::COLUMNS_LAST ? R::COLUMNS : R::IN_FEATURES;
    const SourceT* x = static_cast<const SourceT*>(source) + at.in;
    const Side& side = run.in;
    if (LAST % CHUNK == 0 && run.aligned) {
#pragma unroll 4
        for (int index = begin + threadIdx.x * CHUNK; index < end; index += THREADS * CHUNK) {
            int column, feature;
            locate<R>(index, column, feature);
            int exist = R::COLUMNS_LAST ? max(0, min(CHUNK, at.columns - column))
                                        : column < at.columns ? CHUNK : 0;
            const SourceT* from = x + column * side.column_stride + feature * side.feature_stride;
            if constexpr (sizeof(SourceT) == sizeof(AccT)) {
                copy_async<16>(tile + place(index), exist ? from : source,
                               exist * int(sizeof(SourceT)));
            } else {
                Vector<SourceT, CHUNK> values = {};
                if (exist == CHUNK) values = load_vector<SourceT, CHUNK>(from);
                else
#pragma unroll
                    for (int e = 0; e < CHUNK; ++e)
                        if (e < exist) values.element[e] = from[e];
#pragma unroll
                for (int e = 0; e < CHUNK; ++e)
                    tile[place(index + e)] = convert<AccT>(values.element[e]);
            }
        }
        return;
    }
    for (int index = begin + threadIdx.x; index < end; index += THREADS) {
        int column, feature, to = index;
        if (run.columns_first && begin == 0 && end == R::INPUTS) {
            column = index % R::COLUMNS;
            feature = index / R::COLUMNS;
            to = R::COLUMNS_LAST ? index : column * R::IN_FEATURES + feature;
        } else {
            locate<R>(index, column, feature);
        }
        AccT value = 0;
        if (column < at.columns)
            value = convert<AccT>(
                load_element<R>(x + column * side.column_stride + feature * side.feature_stride));
        tile[place(to)] = value;
    }
}
