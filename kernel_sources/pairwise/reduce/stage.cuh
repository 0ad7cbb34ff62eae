// The points that rows of few features meet, in shared memory, read as broadcasts of 16 bytes. What
// reduce/small.cuh and topk/small.cuh share.
#pragma once

#include "pairwise/reduce/fill.cuh"
#include "pairwise/reduce/launch.cuh"
#include "pairwise/reduce/reduce.cuh"
#include "pairwise/reduce/rows.cuh"

static_assert(STAGE % THREADS == 0, "each thread reads as many points");
constexpr int CHUNK = 16 / sizeof(AccT);  // of a line, read at once
constexpr int LINE = (K + Reducer::COLUMNS + CHUNK - 1) / CHUNK * CHUNK;
// Pairs in flight: 16, or fewer where each is long and hides latency by itself; 8 in double, whose
// numbers take two registers each, and 4 where their values are powers: of 8 up to 232 bytes spill,
// of 4 beside what partners need 64.
constexpr int DOUBLES = !Config::POWERS ? 8 : PARTNERS > 1 ? 2 : 4;
constexpr int PAIRS = sizeof(AccT) == 8 ? DOUBLES : LINE <= 8 ? 16 : (LINE <= 16 ? 8 : 4);
constexpr int POINTS = PAIRS > ROWS ? PAIRS / ROWS : 1;
constexpr int UNROLL = PARTNERS > 1 && POINTS > 4 ? 4 : POINTS;  // partners have few points each

// Those of squares, which are none of mend.cuh's norms: it is told to the compiler.
template <int COUNT>
__device__ __forceinline__ void absolute_sums(AccT (&sums)[COUNT][ROWS]) {
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) sums[e][i] = absolute(sums[e][i]);
    }
}

// Whether all numbers of points are spaced as is_spaced says, where that decides anything.
template <int N>
__device__ __forceinline__ bool are_spaced(const AccT (&numbers)[N]) {
    bool spaced = true;
    if constexpr (BY_SPACING) {
#pragma unroll
        for (int i = 0; i < N; ++i) spaced &= is_spaced(numbers[i]);
    }
    return spaced;
}

__device__ __forceinline__ bool are_spaced(const Rows& rows) {
    bool spaced = true;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) spaced &= are_spaced(rows[i]);
    return spaced;
}

// Waits for all threads of a block. Whether any of them has numbers whose sums must be looked at.
__device__ __forceinline__ bool must_look(bool spaced) {
    if constexpr (BY_SPACING) return __syncthreads_or(!spaced);
    __syncthreads();
    return MENDED;
}

struct Stage {
    alignas(16) AccT line[STAGE][LINE];

    // Point n, by the thread of its place. Returns whether what it has stored is spaced.
    __device__ __forceinline__ bool fill(const Parameters& parameters, i64 l, i64 n) {
        return n >= parameters.n || fill_line(line[threadIdx.x], parameters, l, n);
    }

    // The points from n0 on, of partners.
    __device__ __forceinline__ bool fill(const Parameters& given, i64 l, i64 n0, i64 last) {
        int count = int(min(last - n0, i64(STAGE)));
        constexpr int COLUMNS = Reducer::COLUMNS;
        Source<InputT> points(given.b, given.b_view, l, n0, K);
        Source<WeightT> weights(weights_of(given), given.v_view, l, n0, given.columns);
        if (points.is_side_by_side<K>() && weights.is_side_by_side<COLUMNS>()) {
            Carried<K, 0, AccT> numbers;
            Carried<COLUMNS, K, AccT> beside;
            numbers.load(points, count);
            beside.load(weights, count);
            numbers.store(line);
            beside.store(line);
            return are_spaced(numbers.numbers);
        }
        bool spaced = true;
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS)
            spaced &= fill_line(line[i], given, l, n0 + i);
        return spaced;
    }

    static __device__ __forceinline__ bool fill_line(AccT* to, const Parameters& parameters, i64 l,
                                                     i64 n) {
        const View& view = parameters.b_view;
        const InputT* from = parameters.b + l * view.batch_stride + n * view.row_stride;
        AccT numbers[K];
#pragma unroll
        for (int k = 0; k < K; ++k) numbers[k] = convert<AccT>(from[k * view.column_stride]);
#pragma unroll
        for (int k = 0; k < K; ++k) to[k] = numbers[k];
        if (Reducer::COLUMNS > 0) read_weights(to + K, parameters, l, n);
        return are_spaced(numbers);
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

// What is odd among the sums of the points n, n + step, ... and the thread's rows, anew. Points
// past the last one are read as that one.
template <int COUNT, class T>
__device__ __forceinline__ void mend_sums(T (&sums)[COUNT][ROWS], const Parameters& parameters,
                                          i64 l, i64 m0, i64 n, int step, const Range& range,
                                          float p) {
    if constexpr (MENDED) {
        bool odd = false;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) odd |= range.excludes(sums[e][i]);
        }
        if (!odd) return;
        const View &left = parameters.a_view, &right = parameters.b_view;
        const InputT* points = parameters.b + l * right.batch_stride;
        i64 a_step = left.column_stride, b_step = right.column_stride;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            const InputT* b = points + min(n + e * step, parameters.n - 1) * right.row_stride;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                i64 m = min(m0 + i * SLOTS, parameters.m - 1);
                const InputT* a = parameters.a + l * left.batch_stride + m * left.row_stride;
                if (range.excludes(sums[e][i]))
                    sums[e][i] = 0.0f - sum_of_pair(a, b, a_step, b_step, K, 0, 1, p);  // no -0
            }
        }
    }
}
