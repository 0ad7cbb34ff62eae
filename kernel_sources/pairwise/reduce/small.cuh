// Reductions for few features: a thread keeps ROWS rows of a in registers and walks over n, whose
// points lie in shared memory with their line of v, read as broadcasts of 16 bytes.
//
// Floor of the Gaussian of K features times C columns on an H200 (132 SM x 128 lanes x 1.98 GHz):
// 2 K + 2 + C issue slots a pair (differences, squares, scale, 2^x, products), and one
// special-function operation, 16 a clock and SM. 100000 x 100000, K = 3, C = 1: 2.7 and 2.4 ms. In
// double 2 K + 15 + C operations of the FP64 lanes, 64 a clock and SM (1.75 GHz on an H100):
// 20000 x 20000, K = 3, C = 1: 0.60 ms.
//
// Facts: class Small of kernlib/families/pairwise/kernels/reduce.py.
#pragma once

#include "pairwise/reduce/stage.cuh"

constexpr int RUN = 64 * PARTNERS;  // of a stage's points, between which reducers settle
// Points of a thread whose sums are there before the values of any, where it looks at them: so they
// do not wait for each other behind the question. Many columns leave no registers for that.
template <bool LOOKS>
constexpr int TOGETHER =
    Reducer::GROUPED || (LOOKS && MENDED && Reducer::COLUMNS <= 4) ? UNROLL : 1;

__shared__ Stage stage;
__shared__ u32 word;

// What the partners of a row have found, put together: half of them hand it on to the others, until
// one has it all, in one order. The stage, which all have read, has room for that: for word after
// word of a reducer, those of neighbours side by side, as 16 columns have 32 words in one bank.
__device__ __forceinline__ void meet(Reducer& reducer) {
    constexpr int WORDS = sizeof(Reducer) / sizeof(u32), HANDED = THREADS / 2;
    static_assert(PARTNERS == 1 || WORDS * HANDED * sizeof(u32) <= sizeof(Stage), "room");
    u32* handed = reinterpret_cast<u32*>(&stage);
    u32 words[WORDS];
#pragma unroll
    for (int half = PARTNERS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (partner() >= half && partner() < 2 * half) {
            memcpy(words, &reducer, sizeof(Reducer));
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
                handed[i * HANDED + threadIdx.x - half * SLOTS] = words[i];
        }
        __syncthreads();
        if (partner() < half) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words[i] = handed[i * HANDED + threadIdx.x];
            Reducer other;
            memcpy(&other, words, sizeof(Reducer));
            reducer.merge(other);
        }
    }
}

// What a block's threads share of a stage's points with their rows.
struct Pairs {
    const Parameters& parameters;
    const Finish& finish;
    const InnerNumbers<AccT>& numbers;
    const Rows& rows;
    Rescale rescale;
    Range range;
    i64 l, m0, n0;
    AccT regularization;
    int base;
    int places[ROWS];

    // Adds the stage's first `count` points. LOOKS: at sums that may have to be computed anew.
    template <bool LOOKS>
    __device__ __forceinline__ void add_all(Reducer (&reducers)[ROWS], int count) const {
        constexpr int AT_ONCE = TOGETHER<LOOKS>;
#pragma unroll 1
        for (int run = 0; run < count; run += RUN) {
            int end = min(run + RUN, count), n = run + partner();
            if constexpr (AT_ONCE > 1) {
#pragma unroll 1
                for (; n + (AT_ONCE - 1) * PARTNERS < end; n += AT_ONCE * PARTNERS)
                    add<LOOKS, AT_ONCE>(reducers, n);
            }
#pragma unroll UNROLL / AT_ONCE
            for (; n < end; n += PARTNERS) add<LOOKS, 1>(reducers, n);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) reducers[i].settle();
        }
    }

    // Adds the COUNT points from n on that are this thread's.
    template <bool LOOKS, int COUNT>
    __device__ __forceinline__ void add(Reducer (&reducers)[ROWS], int n) const {
        AccT line[COUNT][LINE], sums[COUNT][ROWS];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            stage.read(line[e], n + e * PARTNERS);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                sums[e][i] = AccT(0);
#pragma unroll
                for (int k = 0; k < K; ++k)
                    sums[e][i] = Term::add(sums[e][i], rows[i][k], line[e][k], numbers);
            }
        }
        if (LOOKS) mend_sums(sums, parameters, l, m0, n0 + n, PARTNERS, range, numbers.p);
        else absolute_sums(sums);
        AccT values[COUNT][ROWS];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            int point = n + e * PARTNERS;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                AccT value = finish(rescale(sums[e][i]), rescale.unit);
                if (IN_PLACE && point == places[i]) value += regularization;
                if constexpr (Reducer::GROUPED) values[e][i] = shifted<Reducer>(value, line[e] + K);
                else reducers[i].add(value, base + point, line[e] + K);
            }
        }
        if constexpr (Reducer::GROUPED) add_exponentials(reducers, values);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_reduce_small(const __grid_constant__ Launch launch) {
    if (!launch.is_needed()) return;
    const Parameters& parameters = launch;
    Part part(parameters, ROWS * SLOTS);
    i64 m0 = part.m0 + slot();
#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        ReadScalar read{parameters, l};
        Finish finish(read);
        InnerNumbers<AccT> numbers = {read(INNER_P), read(INNER_SCALE)};
        Rows rows;
        read_rows(rows, parameters, l, m0);
        if constexpr (SCALED)
            numbers.unit = sample_unit(&word, rows, parameters, part, l, numbers.p);
        Pairs pairs = {parameters, finish, numbers, rows, Rescale(numbers), Range(numbers.p, K), l,
                       m0, 0, IN_PLACE ? read(REGULARIZATION) : AccT(0)};
        bool spaced = are_spaced(rows);
        Reducer reducers[ROWS];
#pragma unroll 1
        for (i64 n0 = part.first; n0 < part.last; n0 += STAGE) {
            __syncthreads();
            bool filled;
            if constexpr (PARTNERS == 1) filled = stage.fill(parameters, l, n0 + threadIdx.x);
            else filled = stage.fill(parameters, l, n0, part.last);
            bool looks = must_look(spaced && filled);
            int count = int(min(part.last - n0, i64(STAGE)));
            // Warps without rows rest, where rows may be few.
            if (ROWS == 1 && m0 - slot() % 32 >= parameters.m) count = 0;
            pairs.n0 = n0;
            pairs.base = int(n0 - part.first);
            if (IN_PLACE) {
#pragma unroll
                for (int i = 0; i < ROWS; ++i) {
                    pairs.places[i] = diagonal_place(parameters, m0 + i * SLOTS, n0);
                }
            }
            if (BY_SPACING && !looks) pairs.add_all<!BY_SPACING>(reducers, count);
            else pairs.add_all<true>(reducers, count);
        }
        if constexpr (PARTNERS > 1) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) meet(reducers[i]);
        }
        if (partner() > 0) continue;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            store_row(reducers[i], parameters, part, l, m0 + i * SLOTS);
        }
    }
}
