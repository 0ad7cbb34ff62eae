// Few features: ROWS rows of a in the registers of a thread, and the points that they meet in
// shared memory, read as broadcasts of 16 bytes. What reduce/small.cuh and topk/small.cuh share.
//
// The generated source defines, beside what reduce/reduce.cuh needs, K, 1 to 16, and ROWS; THREADS
// of a block is defined ahead of this.
#pragma once

#include "pairwise/reduce/reduce.cuh"
#include "pairwise/unit.cuh"

constexpr int STAGE = THREADS;  // points at a time, one a thread to read; at most 32 KB
constexpr int LINE = (K + Reducer::COLUMNS + 3) / 4 * 4;
// Pairs in flight: 16, or fewer where each is long and hides latency by itself.
constexpr int PAIRS = LINE <= 8 ? 16 : (LINE <= 16 ? 8 : 4);
constexpr int UNROLL = PAIRS > ROWS ? PAIRS / ROWS : 1;

struct Stage {
    alignas(16) AccT line[STAGE][LINE];

    __device__ __forceinline__ void fill(const Parameters& parameters, i64 l, i64 n) {
        if (n >= parameters.n) return;
        AccT* to = line[threadIdx.x];
        const View& view = parameters.b_view;
        const InputT* from = parameters.b + l * view.batch_stride + n * view.row_stride;
#pragma unroll
        for (int k = 0; k < K; ++k) to[k] = convert<AccT>(from[k * view.column_stride]);
        if (Reducer::COLUMNS > 0) read_weights(to + K, parameters, l, n);
    }

    __device__ __forceinline__ void read(AccT (&to)[LINE], int n) const {
#pragma unroll
        for (int c = 0; c < LINE; c += 4) {
            auto chunk = load_vector<AccT, 4>(line[n] + c);
#pragma unroll
            for (int e = 0; e < 4; ++e) to[c + e] = chunk.element[e];
        }
    }
};

using Rows = AccT[ROWS][K];

// Rows past the last one are read as that one and never written.
__device__ __forceinline__ void read_rows(Rows& rows, const Parameters& parameters, i64 l, i64 m0) {
    const View& view = parameters.a_view;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        i64 m = min(m0 + i * THREADS, parameters.m - 1);
        const InputT* from = parameters.a + l * view.batch_stride + m * view.row_stride;
#pragma unroll
        for (int k = 0; k < K; ++k) rows[i][k] = convert<AccT>(from[k * view.column_stride]);
    }
}

// The reciprocal of a block's unit, from a pair of points for each thread.
__device__ __forceinline__ float sample_unit(u32* shared, const Rows& rows,
                                             const Parameters& parameters, const Part& part, i64 l,
                                             float p) {
    const View& view = parameters.b_view;
    i64 n = part.first + threadIdx.x % max(part.last - part.first, i64(1));
    const InputT* from = parameters.b + l * view.batch_stride + n * view.row_stride;
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        float size = absolute(Term::of(rows[0][k], convert<AccT>(from[k * view.column_stride])));
        largest = size - size == 0.0f ? fmaxf(largest, size) : largest;
    }
    return unit_of(largest_in_block(shared, largest), p);
}

#ifdef BY_NORM
// What is odd among the sums of point n and the thread's rows, anew.
__device__ __forceinline__ void mend_norms(AccT (&sums)[ROWS], const Parameters& parameters, i64 l,
                                           i64 m0, i64 n, const Range& range, float p) {
    bool odd = false;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) odd |= range.excludes(sums[i]);
    if (!odd) return;
    const View &left = parameters.a_view, &right = parameters.b_view;
    const InputT* b = parameters.b + l * right.batch_stride + n * right.row_stride;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        i64 m = min(m0 + i * THREADS, parameters.m - 1);
        const InputT* a = parameters.a + l * left.batch_stride + m * left.row_stride;
        if (range.excludes(sums[i]))
            sums[i] = -norm_of_pair(a, b, left.column_stride, right.column_stride, K, 0, 1, p);
    }
}
#endif
