// A tile of sums to out: each warp finishes its 16 lines in parts of PART columns, which pass
// through shared memory, so that Finish is there for 16 sums only and neighbouring threads store
// side by side. Those 16 do not wait for each other: with a vote on each line and the branches of
// exact square roots, 30000 x 30000 x 32 took 3 ms, whose stores take 1.1.
#pragma once

#include "pairwise/split/direct.cuh"
#include "pairwise/split/launch.cuh"

constexpr int LINES = 4;  // of a part, that a thread finishes: every fourth one

using Four = Vector<float, 4>;

// The warp's rows in the tile's frame, and what of the tile exists.
struct Rows {
    int first, rows, columns;
    i64 m0, n0, l;
    bool crossing;  // SYMMETRIC: whether entries below the diagonal are among the tile's
};

// Where in shared memory: each line has its groups of eight columns in an order of its own, so that
// pairs of columns of 4 lines, and columns of 4 lines, lie in all banks.
__device__ __forceinline__ int place_in_part(int line, int column) {
    return line * PART + (column ^ line % 4 * 8);
}

// Accumulators 4c .. 4c+3 of a thread are columns 8c + 2 (lane % 4) + {0, 1} of lines lane / 4 and
// lane / 4 + 8 of its warp's sixteen. One part of them to shared memory.
__device__ __forceinline__ void stage_part(const float (&sums)[SUMS], float* staged, int part) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < PARTS; ++q) {
        if (q == part) {
#pragma unroll
            for (int c = 0; c < PART / 8; ++c) {
                const float* x = sums + (q * (PART / 8) + c) * 4;
                float* to = staged + place_in_part(lane / 4, c * 8 + lane % 4 * 2);
                store_vector(to, Vector<float, 2>{x[0], x[1]});
                store_vector(to + 8 * PART, Vector<float, 2>{x[2], x[3]});
            }
        }
    }
}

__device__ __forceinline__ void load_lines(Four (&values)[LINES], const float* place) {
#pragma unroll
    for (int i = 0; i < LINES; ++i) values[i] = load_vector<float, 4>(place + i * (4 * PART));
}

__device__ __forceinline__ void keep_lines(const Four (&values)[LINES], float* place) {
#pragma unroll
    for (int i = 0; i < LINES; ++i) store_vector(place + i * (4 * PART), values[i]);
    __syncwarp();
}

// Accumulators to sums: scales and norms of the points. Whether none of them is doubtful.
__device__ __forceinline__ bool scale_lines(Four (&values)[LINES], const PointInfo (&left)[LINES],
                                            const PointInfo* points) {
    auto first = load_vector<PointInfo, 2>(points), second = load_vector<PointInfo, 2>(points + 2);
    bool certain = true;
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            PointInfo right = e < 2 ? first.element[e] : second.element[e - 2];
            float norms = left[i].norm + right.norm;
            float x = scaled_sum(values[i].element[e], left[i].scale, right.scale, norms);
            certain &= !is_doubtful(x, norms);
            values[i].element[e] = x;
        }
    }
    return certain;
}

// Puts direct sums where `flags`, a bit for each of the four columns of a thread, says so.
__device__ __forceinline__ void repair(const Parameters& p, const Rows& at, float* staged, int line,
                                       int column, u32 flags) {
    u32 lanes = __ballot_sync(~0u, flags);
#pragma unroll 1
    while (lanes) {
        int source = __ffs(lanes) - 1;
        lanes &= lanes - 1;
        u32 waiting = __shfl_sync(~0u, flags, source);
        int row = __shfl_sync(~0u, line, source), first = __shfl_sync(~0u, column, source);
#pragma unroll 1
        while (waiting) {
            int place = first + __ffs(waiting) - 1;
            waiting &= waiting - 1;
            float sum = sum_directly(p, at.l, at.m0 + at.first + row, at.n0 + place);
            if (threadIdx.x % 32 == 0) staged[place_in_part(row, place % PART)] = sum;
        }
    }
}

// The doubtful ones among the sums of a part in shared memory, anew.
__device__ __forceinline__ void repair_part(const Parameters& p, const Rows& at,
                                            const PointInfo* points, float* staged, int part) {
    int lane = threadIdx.x % 32, column = part * PART + lane % 8 * 4;
    u32 inside = (1u << max(0, min(4, at.columns - column))) - 1;
#pragma unroll 1
    for (int line = lane / 8; line < 16; line += 4) {
        auto value = load_vector<float, 4>(staged + place_in_part(line, lane % 8 * 4));
        float left = points[at.first + line].norm;
        u32 flags = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float norms = left + points[TILE_M + column + e].norm;
            flags |= u32(is_doubtful(value.element[e], norms)) << e;
        }
        __syncwarp();
        repair(p, at, staged, line, column, at.first + line < at.rows ? flags & inside : 0);
    }
    __syncwarp();
}

// Four elements each to lines of out `step` apart, as far as `count` of those, by fours, are there.
__device__ __forceinline__ void store_lines(Four (&values)[LINES], OutputT* to, i64 step, int count,
                                            bool accumulate) {
    if (accumulate) {
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            if (4 * i >= count) break;
            auto old = load_vector<OutputT, 4>(to + i * step);
#pragma unroll
            for (int e = 0; e < 4; ++e) values[i].element[e] += convert<float>(old.element[e]);
        }
    }
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        if (4 * i >= count) break;
        Vector<OutputT, 4> result;
#pragma unroll
        for (int e = 0; e < 4; ++e) result.element[e] = convert<OutputT>(values[i].element[e]);
        store_vector(to + i * step, result);
    }
}

__device__ __forceinline__ void store_one(OutputT* to, float value, bool accumulate) {
    if (accumulate) value += convert<float>(*to);
    *to = convert<OutputT>(value);
}

// A finished part from shared memory to out, element by element.
__device__ __forceinline__ void store_elements(const Parameters& p, const Rows& at,
                                               const float* staged, int part) {
    int lane = threadIdx.x % 32, rows = min(at.rows - at.first, 16);
    i64 m = at.m0 + at.first, n = at.n0 + part * PART;
    i64 below = SYMMETRIC && at.crossing ? m - n : -i64(PART);  // columns before row 0's diagonal
    if (lane >= at.columns - part * PART) return;
    OutputT* to = p.out + at.l * p.out_view.batch_stride + m * p.out_view.row_stride +
                  (n + lane) * p.out_view.column_stride;
#pragma unroll 4
    for (int row = 0; row < rows; ++row, to += p.out_view.row_stride)
        if (lane - row >= below) store_one(to, staged[place_in_part(row, lane)], p.accumulate);
}

// What of it lies above the diagonal, to its place below.
__device__ __forceinline__ void mirror_elements(const Parameters& p, const Rows& at,
                                                const float* staged, int part) {
    int lane = threadIdx.x % 32, row = lane % 16, columns = min(at.columns - part * PART, PART);
    i64 m = at.m0 + at.first, n = at.n0 + part * PART;
    if (row >= at.rows - at.first) return;
    OutputT* to = p.out + at.l * p.out_view.batch_stride + (n + lane / 16) * p.out_view.row_stride +
                  (m + row) * p.out_view.column_stride;
#pragma unroll 4
    for (int column = lane / 16; column < columns; column += 2, to += 2 * p.out_view.row_stride)
        if (column - row > m - n)
            store_one(to, staged[place_in_part(row, column)], p.accumulate);
}

// The same of a part of 16 whole lines above the diagonal, by 4 lines at a time. Lanes that share a
// column begin at different ones of their lines, as those lie in different banks.
__device__ __forceinline__ void mirror_vectors(const Parameters& p, const Rows& at,
                                               const float* staged, int part) {
    int lane = threadIdx.x % 32, turn = lane % 4, column = lane / 4;
    OutputT* to = p.out + at.l * p.out_view.batch_stride +
                  (at.n0 + part * PART + column) * p.out_view.row_stride + at.m0 + at.first +
                  turn * 4;
    Four values[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
        float read[4], half[4];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            read[e] = staged[place_in_part(turn * 4 + (e + turn) % 4, i * 8 + column)];
#pragma unroll
        for (int e = 0; e < 4; ++e) half[e] = turn & 1 ? read[(e + 3) % 4] : read[e];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            values[i].element[e] = turn & 2 ? half[(e + 2) % 4] : half[e];
    }
    store_lines(values, to, 8 * p.out_view.row_stride, 4 * LINES, p.accumulate);
}

__device__ __forceinline__ void store_tile(const float (&sums)[SUMS], const Parameters& p,
                                           const PointInfo* points, float* parts,
                                           const Tile& tile) {
    int warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32, line = lane / 8;
    i64 m0 = i64(tile.row) * TILE_M, n0 = i64(tile.column) * TILE_N;
    Rows at = {warp * 16, int(min(p.m - m0, i64(TILE_M))), int(min(p.n - n0, i64(TILE_N))),
               m0, n0, tile.l, n0 < m0 + TILE_M};
    int column = lane % 8 * 4, rows = at.rows - at.first;
    float* staged = parts + warp * (16 * PART);
    float* place = staged + place_in_part(line, column);
    Finish finish(ReadScalar{p, at.l});
    float regularization = ReadScalar{p, at.l}(REGULARIZATION);
    // m + diagonal - n of the warp's first entry, far outside the tile cut to an int's range.
    int ahead = int(max(min(m0 + at.first + p.diagonal - n0, i64(2 * TILE_N)), i64(-TILE_M)));
    PointInfo left[LINES];
#pragma unroll
    for (int i = 0; i < LINES; ++i) left[i] = points[at.first + line + 4 * i];
    OutputT* to = p.out + at.l * p.out_view.batch_stride +
                  (m0 + at.first + line) * p.out_view.row_stride + n0 + column;
#pragma unroll 1
    for (int part = 0; part * PART < at.columns; ++part, ahead -= PART, to += PART) {
        bool vectors = p.out_vectors && part * PART + PART <= at.columns &&
                       !(SYMMETRIC && at.crossing);
        Four values[LINES];
        stage_part(sums, staged, part);
        __syncwarp();
        load_lines(values, place);
        bool certain = scale_lines(values, left, points + TILE_M + part * PART + column);
        if (!__all_sync(~0u, certain)) {
            keep_lines(values, place);
            repair_part(p, at, points, staged, part);
            load_lines(values, place);
        }
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) values[i].element[e] = finish(values[i].element[e]);
        }
        if (regularization != 0.0f && ahead > -16 && ahead < PART) {
#pragma unroll
            for (int i = 0; i < LINES; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (column + e - line - 4 * i == ahead) values[i].element[e] += regularization;
            }
        }
        if (!vectors || SYMMETRIC) keep_lines(values, place);
        if (vectors)
            store_lines(values, to, 4 * p.out_view.row_stride, rows - line, p.accumulate);
        if (!vectors || SYMMETRIC) {
            if (!vectors) store_elements(p, at, staged, part);
            if (SYMMETRIC && vectors && rows >= 16) mirror_vectors(p, at, staged, part);
            else if (SYMMETRIC) mirror_elements(p, at, staged, part);
        }
        __syncwarp();
    }
}
