// What the launches of gradients of many features share: points/pack.cuh, points/points.cuh and,
// behind the gate, points/direct.cuh. A launch has rows, of a or of b, and lines, of the other one,
// and leaves for each row the gradients by its point and its v, and parts of those by
// hyperparameters: see reduce/gradient.cuh, whose roles these are.
//
// Facts and struct Fixed: class Points of kernlib/families/pairwise/kernels/points.py.
#pragma once

#include "pairwise/product/parameters.cuh"
#include "pairwise/role.cuh"
#include "pairwise/scalars.cuh"
#include "pairwise/split/parameters.cuh"

using InputT = Config::InputT;  // storage
constexpr Role ROLE = Config::ROLE;
constexpr int COLUMNS = Config::COLUMNS;      // of g and v, 1 to 4
constexpr bool WEIGHTED = Config::WEIGHTED;   // there is a v; sums have ones in its place
constexpr bool WANTS_POINTS = Config::WANTS_POINTS;  // gradients of the rows' points
constexpr bool WANTS_VALUES = Config::WANTS_VALUES;  // gradients of v
constexpr int HYPER = Config::HYPER;          // hyperparameters whose gradients are wanted
// Whether a line has a one behind its features, which WIDTH has room for: features are padded to 8.
constexpr bool COUNTED = Config::COUNTED;
constexpr int SCALARS = Config::SCALARS;

constexpr bool BOTH = ROLE == Role::both;
constexpr bool ROWS_GIVEN = ROLE != Role::second, LINES_GIVEN = ROLE != Role::first;
// Numbers of a row or of a line: its g, if it is a point of a, then its v, if it is one of b.
constexpr int NUMBERS = BOTH ? 2 * COLUMNS : COLUMNS;
// Of a stage of lines: words of their features (V of product/parameters.cuh), then numbers.
constexpr int FEATURE_BYTES = WANTS_POINTS ? V_BYTES : 0;
constexpr int LINES_BYTES = FEATURE_BYTES + TILE_N * NUMBERS * 4;

using Byte = unsigned char;

struct PointsOperands {
    Gate* gate;
    const Byte* packed_a;
    const Byte* packed_b;
    const PointInfo* a_info;
    const PointInfo* b_info;
    Byte* packed_lines;
    const float* centre;
    const InputT* a;
    const InputT* b;
    const InputT* g;
    const InputT* v;
    float* points;                       // (splits, batch, M, K)
    float* values;                       // (splits, batch, M, columns)
    float* totals;                       // (splits, M, batch, HYPER)
};

struct PointsLaunch : PointsOperands, ScalarValues<SCALARS>, Fixed {};
static_assert(sizeof(PointsLaunch) == Config::PARAMETER_BYTES, "as the host lays it out");

// What a block computes: rows from m0 on, and n from first on. Lowering sees to it that they are
// counted by an int.
struct Share {
    int l, split, m0, first, last;

    __device__ __forceinline__ Share(const PointsLaunch& p, int rows) {
        u32 blocks = u32(p.row_blocks), inside = blockIdx.x % (blocks * u32(p.splits));
        l = int(blockIdx.x / (blocks * u32(p.splits)));
        m0 = int(inside % blocks) * rows;
        split = int(inside / blocks);
        first = int(split * p.per_split);
        last = int(min(first + p.per_split, p.n));
    }
    __device__ __forceinline__ i64 row(const PointsLaunch& p, i64 m) const {
        return (split * p.batch + l) * p.m + m;
    }
};

// n from n0 on, of which `columns` exist.
struct Tile {
    int n0, columns;
};

__device__ __forceinline__ void read_columns(float* to, const InputT* from, const View& view, i64 l,
                                             i64 point, int columns) {
    from += l * view.batch_stride + point * view.row_stride;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        to[c] = c < columns ? convert<float>(from[c * view.column_stride]) : 0.0f;
}

// Those of a point, zeros where there is none.
template <bool GIVEN, bool WEIGHTS>
__device__ __forceinline__ void read_numbers(float (&to)[NUMBERS], const PointsLaunch& p, i64 l,
                                             i64 point, bool exists) {
    int columns = exists ? p.columns : 0;
    constexpr int SECOND = GIVEN ? COLUMNS : 0;
    if (GIVEN) read_columns(to, p.g, p.g_view, l, point, columns);
    if (WEIGHTS && WEIGHTED) read_columns(to + SECOND, p.v, p.v_view, l, point, columns);
    if (WEIGHTS && !WEIGHTED) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) to[SECOND + c] = c < columns ? 1.0f : 0.0f;
    }
}
__device__ __forceinline__ void read_row(float (&to)[NUMBERS], const PointsLaunch& p, i64 l,
                                         i64 m) {
    read_numbers<ROWS_GIVEN, ROLE != Role::first>(to, p, l, m, m < p.m);
}
__device__ __forceinline__ void read_line(float (&to)[NUMBERS], const PointsLaunch& p, i64 l,
                                          i64 n) {
    read_numbers<LINES_GIVEN, ROLE != Role::second>(to, p, l, n, n < p.n);
}

// What a pair is worth: its g times its v, and for both of its places the sum of both.
__device__ __forceinline__ float worth(const float* row, const float* line) {
    float sum = row[0] * line[BOTH ? COLUMNS : 0];
    if (BOTH) sum = fmaf(row[COLUMNS], line[0], sum);
#pragma unroll
    for (int c = 1; c < COLUMNS; ++c) {
        sum = fmaf(row[c], line[BOTH ? COLUMNS + c : c], sum);
        if (BOTH) sum = fmaf(row[COLUMNS + c], line[c], sum);
    }
    return sum;
}
