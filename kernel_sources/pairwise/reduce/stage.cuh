// The points that rows of few features meet, in shared memory, read as broadcasts of 16 bytes. What
// reduce/small.cuh and topk/small.cuh share.
//
// The generated source defines, beside what reduce/reduce.cuh needs, K, 1 to 16, and ROWS; THREADS
// of a block is defined ahead of this.
#pragma once

#include "pairwise/reduce/reduce.cuh"
#include "pairwise/reduce/rows.cuh"

constexpr int STAGE = THREADS;  // points at a time, one a thread to read; at most 32 KB
constexpr int CHUNK = 16 / sizeof(AccT);  // of a line, read at once
constexpr int LINE = (K + Reducer::COLUMNS + CHUNK - 1) / CHUNK * CHUNK;
// Pairs in flight: 16, or fewer where each is long and hides latency by itself; 8 in double, whose
// numbers take two registers each, and 4 where their values are powers: of 8 up to 232 bytes spill.
#ifdef POWERS
constexpr int DOUBLES = 4;
#else
constexpr int DOUBLES = 8;
#endif
constexpr int PAIRS = sizeof(AccT) == 8 ? DOUBLES : LINE <= 8 ? 16 : (LINE <= 16 ? 8 : 4);
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
        for (int c = 0; c < LINE; c += CHUNK) {
            auto chunk = load_vector<AccT, CHUNK>(line[n] + c);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) to[c + e] = chunk.element[e];
        }
    }
};

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
