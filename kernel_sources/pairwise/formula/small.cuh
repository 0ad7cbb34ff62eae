// Reductions of formulas of few features: a thread keeps ROWS rows in registers, with all that
// depends on them alone, and walks over columns, whose values lie in shared memory as lines that
// are read as broadcasts of 16 bytes.
//
// Floor of exp(-|x - y|^2 / (s t)) w of K features on an H200 (132 SM x 128 lanes x 1.98 GHz): 2 K
// + 4 issue slots a pair (differences, squares, both scales, 2^x and the sum), and one
// special-function operation, 16 a clock and SM. 100000 x 100000, K = 3: 3.0 and 2.4 ms. In double
// 2 K + 17 operations of the FP64 lanes, 64 a clock and SM. Bytes: each point once a block.
//
// Facts: class Small of kernlib/families/pairwise/formula/kernels/small.py.
#pragma once

#include "pairwise/formula/part.cuh"

constexpr int THREADS = Config::THREADS;
constexpr int ROWS = Config::ROWS;          // of a thread
constexpr int PARTNERS = Config::PARTNERS;  // threads that share a row's columns
constexpr int STAGE = Config::STAGE;        // columns in shared memory
constexpr bool CHUNKED = Config::CHUNKED;   // whether the unit's features are divided among blocks

constexpr int SLOTS = THREADS / PARTNERS;  // threads with rows of their own
constexpr int RUN = 64 * PARTNERS;         // columns between which reducers settle
constexpr int CHUNK = 16 / sizeof(AccT);   // of a line, read at once
constexpr int LINE = (AT_LEAST_ONE<Formula::C_WORDS> + CHUNK - 1) / CHUNK * CHUNK;
constexpr int T_SIZE = AT_LEAST_ONE<Formula::T_WORDS>, R_SIZE = AT_LEAST_ONE<Formula::R_WORDS>;
// Pairs in flight: 16, or fewer where each is long and hides latency by itself.
constexpr int PAIRS = sizeof(AccT) == 8 ? 8 : LINE <= 8 ? 16 : (LINE <= 16 ? 8 : 4);
constexpr int POINTS = PAIRS > ROWS ? PAIRS / ROWS : 1;
constexpr int UNROLL = PARTNERS > 1 && POINTS > 4 ? 4 : POINTS;  // partners have few columns each
constexpr int WORDS = sizeof(Reducer) / sizeof(u32), HANDED = THREADS / 2;
constexpr int MEETING = PARTNERS > 1 ? WORDS * HANDED * sizeof(u32) : 0;
constexpr int STAGE_BYTES = STAGE * LINE * sizeof(AccT);

__shared__ alignas(16) unsigned char room[STAGE_BYTES > MEETING ? STAGE_BYTES : MEETING];
__shared__ int ends[2 * THREADS / 32];

__device__ __forceinline__ int slot() { return PARTNERS == 1 ? threadIdx.x : threadIdx.x % SLOTS; }
__device__ __forceinline__ int partner() { return PARTNERS == 1 ? 0 : threadIdx.x / SLOTS; }

// The words of feature k of a group.
template <int G, class Word>
__device__ __forceinline__ Word* of_thread(Word* t, int k) {
    return t + Formula::T_AT[G] + k * Formula::T_WIDTH[G];
}
template <int G, class Word>
__device__ __forceinline__ Word* of_row(Word* r, int k) {
    return r + Formula::R_AT[G] + k * Formula::R_WIDTH[G];
}
template <int G, class Word>
__device__ __forceinline__ Word* of_col(Word* c, int k) {
    return c + Formula::C_AT[G] + k * Formula::C_WIDTH[G];
}

// Whether the columns from `first` to `end` are those of all rows of a thread, of some or of none.
enum class RunOf { ALL, SOME, NONE };

__device__ __forceinline__ RunOf kind_of_run(const Columns (&columns)[ROWS], int first, int end) {
    bool all = true, none = RANGED;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        all &= columns[i].first <= first && end <= columns[i].last;
        none &= columns[i].last <= first || end <= columns[i].first;
    }
    return none ? RunOf::NONE : (all || !RANGED ? RunOf::ALL : RunOf::SOME);
}

__device__ __forceinline__ void read_line(AccT (&to)[LINE], const AccT* line) {
#pragma unroll
    for (int c = 0; c < LINE; c += CHUNK) {
        auto chunk = load_vector<AccT, CHUNK>(line + c);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) to[c + e] = chunk.element[e];
    }
}

// What does not change in a thread's walk.
struct Walk {
    const Parameters& call;
    i64 l;
    int f0;  // first feature of the unit
    AccT t[T_SIZE];

    // Feature k of a group.
    template <int G>
    __device__ __forceinline__ int feature(int k) const {
        return CHUNKED && G == Formula::UNIT ? min(f0 + k, call.features - 1) : k;
    }

    template <int G = 0>
    __device__ __forceinline__ void fill_thread() {
        if constexpr (G == 0) Formula::of_thread(t, call, l);
        if constexpr (G < Formula::GROUPS) {
            if constexpr (Formula::T_WIDTH[G] > 0) {
#pragma unroll
                for (int k = 0; k < Formula::SIZE[G]; ++k)
                    Formula::thread_feature(Nth<G>(), of_thread<G>(t, k), t, call, l, 0,
                                            feature<G>(k));
            }
            fill_thread<G + 1>();
        }
    }

    template <int G = 0>
    __device__ __forceinline__ void fill_row(AccT* r, int row) const {
        if constexpr (G == 0) Formula::of_row(r, t, call, l, row);
        if constexpr (G < Formula::GROUPS) {
            if constexpr (Formula::R_WIDTH[G] > 0) {
#pragma unroll
                for (int k = 0; k < Formula::SIZE[G]; ++k)
                    Formula::row_feature(Nth<G>(), of_row<G>(r, k), t, call, l, row,
                                         feature<G>(k));
            }
            fill_row<G + 1>(r, row);
        }
    }

    template <int G = 0>
    __device__ __forceinline__ void fill_col(AccT* c, int col) const {
        if constexpr (G == 0) Formula::of_col(c, t, call, l, col);
        if constexpr (G < Formula::GROUPS) {
            if constexpr (Formula::C_WIDTH[G] > 0) {
#pragma unroll
                for (int k = 0; k < Formula::SIZE[G]; ++k)
                    Formula::col_feature(Nth<G>(), of_col<G>(c, k), t, call, l, col,
                                         feature<G>(k));
            }
            fill_col<G + 1>(c, col);
        }
    }

    template <int I = 0>
    __device__ __forceinline__ void add_terms(AccT* sums, const AccT* r, const AccT* c, int row,
                                              int col) const {
        if constexpr (I < TERMS) {
            if constexpr (Formula::OF_PAIR[I]) {
                constexpr int G = Formula::GROUP[I];
                AccT sum = AccT(0);
#pragma unroll
                for (int k = 0; k < Formula::SIZE[G]; ++k)
                    sum += Formula::term(Nth<I>(), t, r, c, of_thread<G>(t, k), of_row<G>(r, k),
                                         of_col<G>(c, k), call, l, row, col, k);
                sums[I] = sum;
            }
            add_terms<I + 1>(sums, r, c, row, col);
        }
    }

    __device__ __forceinline__ AccT score(const AccT* r, const AccT* c, int row, int col) const {
        AccT sums[SUMS];
        add_terms(sums, r, c, row, col);
        return Formula::score(t, r, c, sums, call, l, row, col);
    }

    __device__ __forceinline__ void add(Reducer& reducer, const AccT* r, const AccT* c, int row,
                                        int col, int place) const {
        AccT value = score(r, c, row, col);
        if constexpr (Reducer::COLUMNS > 0) {
            constexpr int G = Formula::UNIT;
            AccT unit[AT_LEAST_ONE<Reducer::COLUMNS>];
#pragma unroll
            for (int k = 0; k < Reducer::COLUMNS; ++k)
                unit[k] = Formula::unit(t, r, c, of_thread<G>(t, k), of_row<G>(r, k),
                                        of_col<G>(c, k), call, l, row, col, feature<G>(k));
            reducer.add(value, place, unit);
        } else {
            reducer.add(value, place, nullptr);
        }
    }

    // Adds COUNT columns of the stage from n on that are a partner's, of rows that have them all.
    template <int COUNT, class Groups>
    __device__ __forceinline__ void add_group(Groups (&reducers)[ROWS],
                                              const AccT (&r)[ROWS][R_SIZE],
                                              const int (&rows)[ROWS], int n, int n0) const {
        AccT scores[ROWS][COUNT];
#pragma unroll
        for (int e = 0; e < COUNT; ++e) {
            AccT line[LINE];
            int at = n + e * PARTNERS;
            read_line(line, reinterpret_cast<const AccT*>(room) + at * LINE);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) scores[i][e] = score(r[i], line, rows[i], n0 + at);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) reducers[i].add_group(scores[i]);
    }

    // Adds the columns of the stage from `run` to `end` that are this partner's. CHECKED: of each
    // row those that it has.
    template <bool CHECKED>
    __device__ __forceinline__ void add_run(Reducer (&reducers)[ROWS],
                                            const AccT (&r)[ROWS][R_SIZE], const int (&rows)[ROWS],
                                            const Columns (&columns)[ROWS], int run, int end,
                                            int n0, int base) const {
        const AccT* stage = reinterpret_cast<const AccT*>(room);
        int n = run + partner();
        if constexpr (TAKES_GROUPS<Reducer> && !CHECKED) {
#pragma unroll 1
            for (; n + (UNROLL - 1) * PARTNERS < end; n += UNROLL * PARTNERS)
                add_group<UNROLL>(reducers, r, rows, n, n0);
        }
#pragma unroll UNROLL
        for (; n < end; n += PARTNERS) {
            AccT line[LINE];
            read_line(line, stage + n * LINE);
            int col = n0 + n;
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                if (CHECKED && (col < columns[i].first || col >= columns[i].last)) continue;
                add(reducers[i], r[i], line, rows[i], col, base + n);
            }
        }
    }
};

// What the partners of a row have, put together: half of them hand it on to the others, until one
// has it all, in one order.
__device__ __forceinline__ void meet(Reducer& reducer) {
    u32* handed = reinterpret_cast<u32*>(room);
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

extern "C" __global__ void __launch_bounds__(THREADS, 2)
formula_small(const __grid_constant__ Parameters call) {
    AccT* stage = reinterpret_cast<AccT*>(room);
    Part part(call, ROWS * SLOTS);
    i64 m0 = part.m0 + slot();
#pragma unroll 1
    for (i64 l = blockIdx.y; l < call.batch; l += gridDim.y) {
        Walk walk{call, l, part.chunk * Reducer::OUTPUTS};
        walk.fill_thread();
        AccT r[ROWS][R_SIZE];
        int rows[ROWS];
        Columns columns[ROWS];
        Reducer reducers[ROWS];
        i64 first = part.first, last = part.last;
        int least = NOWHERE, most = 0;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            // Rows past the last one are read as that one and never written.
            rows[i] = int(min(m0 + i * SLOTS, i64(call.rows - 1)));
            walk.fill_row(r[i], rows[i]);
            columns[i] = columns_of(call, rows[i], first, last);
            reducers[i] = reducer_of(columns[i], first);
            if (columns[i].first < columns[i].last) {
                least = min(least, columns[i].first);
                most = max(most, columns[i].last);
            }
        }
        if (RANGED) {
            Columns every = columns_of_block<THREADS>(least, most, ends);
            first = every.first, last = every.last;
        }
#pragma unroll 1
        for (i64 n0 = first; n0 < last; n0 += STAGE) {
            int count = int(min(last - n0, i64(STAGE)));
            __syncthreads();
#pragma unroll 1
            for (int n = threadIdx.x; n < count; n += THREADS) {
                AccT line[LINE];
                walk.fill_col(line, int(n0) + n);
#pragma unroll
                for (int c = 0; c < Formula::C_WORDS; ++c) stage[n * LINE + c] = line[c];
            }
            __syncthreads();
            // Warps without rows rest, where rows may be few.
            if (ROWS == 1 && m0 - slot() % 32 >= call.rows) count = 0;
            int base = int(n0 - part.first);
#pragma unroll 1
            for (int run = 0; run < count; run += RUN) {
                int end = min(run + RUN, count);
                RunOf kind = kind_of_run(columns, int(n0) + run, int(n0) + end);
                if (kind == RunOf::NONE) continue;
                if (RANGED && kind == RunOf::SOME)
                    walk.add_run<true>(reducers, r, rows, columns, run, end, int(n0), base);
                else
                    walk.add_run<false>(reducers, r, rows, columns, run, end, int(n0), base);
#pragma unroll
                for (int i = 0; i < ROWS; ++i) reducers[i].settle();
            }
        }
        if constexpr (PARTNERS > 1) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i) meet(reducers[i]);
        }
        if (partner() > 0) continue;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            store_row(reducers[i], call, part, l, m0 + i * SLOTS, walk.f0);
    }
}
