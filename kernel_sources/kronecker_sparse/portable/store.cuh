// A tile's sums through shared memory to device memory. They wait there as fp32 in the order in
// which out is written, so that the epilogue is a short loop over 16-byte stores: over a thread's
// registers it would be up to 64 copies.
#pragma once

#include "kronecker_sparse/portable/multiply.cuh"

constexpr int OUT_CHUNK = 16 / sizeof(OutputT);
// Steps between lines of the waiting sums, chosen for writes without bank conflicts: of pairs in
// eight rows, or of single sums in eight columns.
constexpr int ROW_PITCH = TILE_COLUMNS + 8, COLUMN_PITCH = TILE_ROWS + 4;

// Where a tile goes.
struct Target {
    OutputT* out;  // of the tile's first row and column
    i64 row_stride, column_stride;
    int rows, columns;      // that exist
    i64 feature, lanes;     // of the first column, and from one column to the next
    bool add, last;         // for sums in parts: out holds what came before; nothing comes after
};

__device__ __forceinline__ void put_sums(float* waiting, const Sums& sums, bool along_rows) {
    int lane = threadIdx.x % 32;
    int row = warp_row() + lane / 4, column = warp_column() + lane % 4 * 2;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int r = row + group * 16 + half * 8, c = column + j * 8;
                float x = sums[group][j][2 * half], y = sums[group][j][2 * half + 1];
                if (along_rows) {
                    waiting[c * COLUMN_PITCH + r] = x;
                    waiting[(c + 1) * COLUMN_PITCH + r] = y;
                } else {
                    store_vector(waiting + r * ROW_PITCH + c, Vector<float, 2>{x, y});
                }
            }
        }
    }
}

__device__ __forceinline__ OutputT finished(float value, const Target& target, const Finish& finish,
                                            const OutputT* at, int column) {
    if (PARTS) {
        if (target.add) value += convert<float>(*at);
        if (!target.last) return convert<OutputT>(value);
    }
    if (Config::EPILOGUE) value = finish(value, target.feature + column * target.lanes);
    return convert<OutputT>(value);
}

// RUN elements of a line at a time; a line is a row of the tile or, ALONG_ROWS, a column.
template <bool ALONG_ROWS, int RUN>
__device__ __forceinline__ void store_lines(const float* waiting, const Target& target,
                                            const Finish& finish) {
    constexpr int LENGTH = ALONG_ROWS ? TILE_ROWS : TILE_COLUMNS;
    constexpr int PITCH = ALONG_ROWS ? COLUMN_PITCH : ROW_PITCH;
    constexpr int ACROSS = LENGTH / RUN, STEP = THREADS / ACROSS;
    int first = threadIdx.x % ACROSS * RUN, line = threadIdx.x / ACROSS;
    int inside = (ALONG_ROWS ? target.rows : target.columns) - first;
    int lines = ALONG_ROWS ? target.columns : target.rows;
    i64 line_stride = ALONG_ROWS ? target.column_stride : target.row_stride;
    i64 element_stride = ALONG_ROWS ? target.row_stride : target.column_stride;
    if (inside <= 0) return;
    OutputT* to = target.out + first * element_stride + line * line_stride;
    const float* from = waiting + line * PITCH + first;
#pragma unroll 1
    for (; line < lines; line += STEP, from += STEP * PITCH, to += STEP * line_stride) {
        if constexpr (RUN == 1) {
            *to = finished(*from, target, finish, to, ALONG_ROWS ? line : first);
        } else {
            Vector<OutputT, RUN> result;
#pragma unroll
            for (int part = 0; part < RUN; part += 4) {
                auto values = load_vector<float, 4>(from + part);
#pragma unroll
                for (int e = part; e < part + 4; ++e) {
                    if (e >= inside) break;
                    result.element[e] = finished(values.element[e - part], target, finish, to + e,
                                                 ALONG_ROWS ? line : first + e);
                }
            }
            if (inside >= RUN) {
                store_vector(to, result);
            } else {
#pragma unroll
                for (int e = 0; e < RUN; ++e) {
                    if (e < inside) to[e] = result.element[e];
                }
            }
        }
    }
}

__device__ __forceinline__ void store_tile(float* waiting, const Sums& sums, const Target& target,
                                           const Finish& finish, bool along_rows, bool vectors) {
    put_sums(waiting, sums, along_rows);
    __syncthreads();
    if (along_rows) {
        if (vectors) store_lines<true, OUT_CHUNK>(waiting, target, finish);
        else store_lines<true, 1>(waiting, target, finish);
    } else {
        if (vectors) store_lines<false, OUT_CHUNK>(waiting, target, finish);
        else store_lines<false, 1>(waiting, target, finish);
    }
}
