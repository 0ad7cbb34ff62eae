// The sums of a tile of TILE x TILE pairs in double: points pass through STAGES of shared memory,
// DEPTH features at a time, and four warps have 32 x 32 pairs each, as the results of products of
// 16 x 8 (common/mma_double.cuh). Sums of terms are kept in the same places.
#pragma once

#include "common/copy_groups.cuh"
#include "common/mma_double.cuh"
#include "pairwise/double/layout.cuh"
#include "pairwise/terms.cuh"

using AccT = Config::AccT;  // double

constexpr int STAGES = 2;
constexpr int LINE = DEPTH + 4;  // of a point: 4 features of 4 of them meet no bank twice
constexpr int OPERAND = TILE * LINE, STAGE = 2 * OPERAND;
constexpr int WARP_TILE = 32, ROWS = WARP_TILE / 16, COLUMNS = WARP_TILE / 8;

using Sums = double[ROWS][COLUMNS][4];
using Numbers = InnerNumbers<AccT>;

// A thread's share: of products i, j the rows i * 16 + half * 8 + g and the columns j * 8 + 2 t + e
// behind the warp's first ones, as sums[i][j][2 * half + e].
struct Place {
    int row, column, g, t;  // the first two are the warp's
    __device__ __forceinline__ Place() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        row = warp / 2 * WARP_TILE;
        column = warp % 2 * WARP_TILE;
        g = lane / 4;
        t = lane % 4;
    }
    __device__ __forceinline__ int row_of(int i, int half) const {
        return row + i * 16 + half * 8 + g;
    }
    __device__ __forceinline__ int column_of(int j) const { return column + j * 8 + 2 * t; }
};

// Tiles as double/pack.cuh left them.
struct PackedTiles {
    const double* a;
    const double* b;

    __device__ __forceinline__ void fill(double* stage, int chunk) const {
        constexpr int PARTS = DEPTH / 2, POINTS = THREADS / PARTS;  // of a point; at a time
        int at = chunk * PIECE + threadIdx.x * 2;
        const double *left = a + at, *right = b + at;
        double* to = stage + threadIdx.x / PARTS * LINE + threadIdx.x % PARTS * 2;
#pragma unroll
        for (int i = 0; i < TILE / POINTS; ++i) {
            copy_async<16>(to + i * POINTS * LINE, left + i * THREADS * 2, 16);
            copy_async<16>(to + i * POINTS * LINE + OPERAND, right + i * THREADS * 2, 16);
        }
    }
};

// One operand's points from the tile's first one on.
struct Points {
    const double* data;
    i64 point_stride, feature_stride;
    int count;  // of points

    // Points and features past the last are zeros.
    __device__ __forceinline__ void fill(double* tile, int first, int features) const {
        int point = threadIdx.x / DEPTH, k = threadIdx.x % DEPTH;
        const double* from = data + point * point_stride + (first + k) * feature_stride;
        double* to = tile + point * LINE + k;
#pragma unroll 1
        for (; point < TILE; point += THREADS / DEPTH) {
            copy_async<8>(to, from, first + k < features && point < count ? 8 : 0);
            from += THREADS / DEPTH * point_stride;
            to += THREADS / DEPTH * LINE;
        }
    }
};

// Tiles as the caller's tensors have them.
struct GivenTiles {
    Points a, b;
    int features;

    __device__ __forceinline__ void fill(double* stage, int chunk) const {
        a.fill(stage, chunk * DEPTH, features);
        b.fill(stage + OPERAND, chunk * DEPTH, features);
    }
};

// Adds products of a chunk's features.
struct Products {
    const Place& place;

    __device__ __forceinline__ void add(Sums& sums, const double* stage, int) const {
        const double* a = stage + (place.row + place.g) * LINE + place.t;
        const double* b = stage + OPERAND + (place.column + place.g) * LINE + place.t;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 8) {
            double left[ROWS][4], right[COLUMNS][2];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    left[i][e] = a[(i * 16 + e % 2 * 8) * LINE + k + e / 2 * 4];
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) {
                right[j][0] = b[j * 8 * LINE + k];
                right[j][1] = b[j * 8 * LINE + k + 4];
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) multiply_fragments(sums[i][j], left[i], right[j]);
            }
        }
    }
};

// Adds the terms of a chunk's features, STEP at a time: behind the last one are zeros, which add
// nothing where STEP is more than 1. With WHOLE all of a chunk are added: tiles of tensor cores are
// seldom summed so, and have no registers for a count.
template <class Term, int STEP, bool WHOLE>
struct Terms {
    const Place& place;
    const Numbers& numbers;
    int features;

    __device__ __forceinline__ void add(Sums& sums, const double* stage, int chunk) const {
        const double* a = stage + (place.row + place.g) * LINE;
        const double* b = stage + OPERAND + place.column_of(0) * LINE;
        int count = WHOLE && STEP > 1 ? DEPTH : min(DEPTH, features - chunk * DEPTH);
#pragma unroll 1
        for (int k = 0; k < count; k += STEP) {
#pragma unroll
            for (int step = 0; step < STEP; ++step) add_feature(sums, a + k + step, b + k + step);
        }
    }

    __device__ __forceinline__ void add_feature(Sums& sums, const double* a,
                                                const double* b) const {
        double left[2 * ROWS];
#pragma unroll
        for (int i = 0; i < 2 * ROWS; ++i) left[i] = a[i * 8 * LINE];
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                double right = b[(j * 8 + e) * LINE];
#pragma unroll
                for (int i = 0; i < 2 * ROWS; ++i) {
                    double& sum = sums[i / 2][j][i % 2 * 2 + e];
                    sum = Term::add(sum, left[i], right, numbers);
                }
            }
        }
    }
};

// The sums of a tile, from zero on.
template <class Tiles, class Chunk>
__device__ __forceinline__ void sum_tile(Sums& sums, double* stages, int chunks,
                                         const Tiles& tiles, const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS * 4; ++i)
        sums[i / 4 / COLUMNS][i / 4 % COLUMNS][i % 4] = 0.0;
    __syncthreads();  // nobody reads what was there before
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (i < chunks) tiles.fill(stages + i * STAGE, i);
        commit_copies();
    }
    int at = 0, next = STAGES - 1;
#pragma unroll 1
    for (int i = 0; i < chunks; ++i) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // this stage is complete, and nobody reads the one before any more
        if (i + STAGES - 1 < chunks) tiles.fill(stages + next * STAGE, i + STAGES - 1);
        commit_copies();
        chunk.add(sums, stages + at * STAGE, i);
        at = at + 1 < STAGES ? at + 1 : 0;
        next = next + 1 < STAGES ? next + 1 : 0;
    }
}
