// From device memory: entries of matrices, and tiles to shared memory, as numbers of TileT, each at
// its place().
#pragma once

#include "common/async_copy.cuh"
#include "kronecker_product/modes/parameters.cuh"

// An entry of a mode's matrix, the product of its factors' entries; zero beside the matrix.
template <class M>
__device__ __forceinline__ AccT entry_of(const Parameters& p, i64 batch, int row, int column) {
    if (row >= M::P || column >= M::Q) return 0;
    AccT value = 1;
#pragma unroll
    for (int part = M::FIRST + M::PARTS - 1; part >= M::FIRST; --part) {
        const Matrix& m = p.matrices[part];
        value *= convert<AccT>(p.factors[part][batch * m.batch_stride +
                                               row % ROWS[part] * m.row_stride +
                                               column % WIDTHS[part] * m.column_stride]);
        row /= ROWS[part];
        column /= WIDTHS[part];
    }
    return value;
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
    if constexpr (!R::WRITTEN_HERE) {
        return *from;
    } else if constexpr (sizeof(*from) == 2) {
        return {__ldcg(&from->bits)};
    } else {
        return __ldcg(from);
    }
}

// Elements `begin` up to `end` of a tile, in multiples of CHUNK. Copies may be under way still.
template <class R>
__device__ __forceinline__ void load_tile(TileT* tile, const Parameters& p, const RunFixed& run,
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
            if constexpr (sizeof(SourceT) == sizeof(TileT)) {
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
                    tile[place(index + e)] = convert<TileT>(values.element[e]);
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
        TileT value = {};
        if (column < at.columns)
            value = convert<TileT>(
                load_element<R>(x + column * side.column_stride + feature * side.feature_stride));
        tile[place(to)] = value;
    }
}

// The part of the next tile of a block that the current one leaves free, or the REST of it: tiles
// lie in turn at the front and AHEAD elements behind it.
template <class R, bool REST>
__device__ __forceinline__ void read_ahead(TileT* tiles, const Parameters& p, const Tile& at,
                                           bool is_behind) {
    constexpr int FIRST = TILE - AHEAD;
    int begin, end;
    if (REST) {
        begin = is_behind ? 0 : AHEAD;
        end = is_behind ? FIRST : TILE;
    } else {
        begin = is_behind ? FIRST : 0;
        end = is_behind ? TILE : AHEAD;
    }
    load_tile<R>(tiles + is_behind * AHEAD, p, p.runs[R::INDEX], p.sources[R::INDEX], at,
                 min(begin, R::INPUTS), min(end, R::INPUTS));
}
