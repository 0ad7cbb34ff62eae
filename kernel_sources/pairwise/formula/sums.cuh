// The main loop of formulas of any number of features: sums of a tile of pairs, TILE x TILE, of
// which each of 16 x 16 threads has SIDE x SIDE. Values of features come in chunks of KC by shared
// memory, where words that depend on a row or a column alone are computed once; and so do the words
// that have no features. Sums of a chunk are added up apart: a chain of 1000 would be off by more.
#pragma once

#include "pairwise/formula/formula.cuh"

constexpr int SIDE = Config::SIDE;

constexpr int THREADS = 256, LANES = 16, TILE = LANES * SIDE, KC = 16;
constexpr int VECTOR = SIDE * sizeof(AccT) <= 16 ? SIDE : 16 / sizeof(AccT);
constexpr int PAD = 16 / sizeof(AccT);  // that leaves lines aligned, and in other banks
constexpr int LINE = TILE + PAD;

// Words of a term's chunk: (words, KC, LINE) of rows, then of columns, then (words, KC) of a
// thread.
template <int I>
struct Chunk {
    static constexpr int OTHERS = Chunk<I + 1>::WORDS, T = Formula::T_WIDTH[I];
    static constexpr int OWN = (Formula::R_WIDTH[I] + Formula::C_WIDTH[I]) * KC * LINE + T * KC;
    static constexpr int WORDS = OWN > OTHERS ? OWN : OTHERS;
};
template <>
struct Chunk<TERMS> {
    static constexpr int WORDS = 0;
};
constexpr int CHUNK_WORDS = (Chunk<0>::WORDS + PAD - 1) / PAD * PAD;
// What lies in front of them: words without features, (words, TILE) of rows and of columns.
constexpr int FREE_WORDS = (Formula::R + Formula::C) * TILE;

using SumsOfPatch = AccT[SIDE][SIDE][SUMS];
using RowWords = AccT[SIDE][AT_LEAST_ONE<Formula::R>];
using ColWords = AccT[SIDE][AT_LEAST_ONE<Formula::C>];

__device__ __forceinline__ int lane() { return threadIdx.x % LANES; }       // of columns
__device__ __forceinline__ int band() { return threadIdx.x / LANES; }       // of rows
__device__ __forceinline__ int in_tile(int lane, int i) { return lane * SIDE + i; }

template <int COUNT>
__device__ __forceinline__ void load_run(AccT (&to)[COUNT], const AccT* from) {
    constexpr int V = COUNT * sizeof(AccT) <= 16 ? COUNT : 16 / sizeof(AccT);
#pragma unroll
    for (int i = 0; i < COUNT; i += V) {
        auto vector = load_vector<AccT, V>(from + i);
#pragma unroll
        for (int e = 0; e < V; ++e) to[i + e] = vector.element[e];
    }
}

// Words of SIDE rows or columns in a row each, from planes `step` apart.
template <int WORDS, int SIZE>
__device__ __forceinline__ void load_words(AccT (&to)[SIDE][SIZE], const AccT* from, int step) {
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        AccT values[SIDE];
        load_run(values, from + word * step);
#pragma unroll
        for (int i = 0; i < SIDE; ++i) to[i][word] = values[i];
    }
}

// A tile, by the thread's share of it.
struct Tile {
    const Parameters& call;
    AccT* shared;
    i64 l;
    int m0, n0;  // its first row and column
    AccT t[AT_LEAST_ONE<Formula::T>];

    // Rows and columns past the last one are read as that one.
    __device__ __forceinline__ int row(int at) const {
        return int(min(i64(m0) + at, i64(call.rows - 1)));
    }
    __device__ __forceinline__ int col(int at) const {
        return int(min(i64(n0) + at, i64(call.cols - 1)));
    }

    __device__ __forceinline__ AccT* col_words() const { return shared + Formula::R * TILE; }
    __device__ __forceinline__ AccT* chunk() const { return shared + FREE_WORDS; }

    // The words without features of the tile's rows, or of its columns. Waits must stand around.
    __device__ __forceinline__ void fill_rows() {
        if (Formula::R == 0 || threadIdx.x >= TILE) return;
        AccT r[AT_LEAST_ONE<Formula::R>];
        Formula::of_row(r, t, call, l, row(threadIdx.x));
#pragma unroll
        for (int word = 0; word < Formula::R; ++word) shared[word * TILE + threadIdx.x] = r[word];
    }
    __device__ __forceinline__ void fill_cols() {
        int place = THREADS - 1 - threadIdx.x;  // threads that have no rows, where there are such
        if (Formula::C == 0 || place >= TILE) return;
        AccT c[AT_LEAST_ONE<Formula::C>];
        Formula::of_col(c, t, call, l, col(place));
#pragma unroll
        for (int word = 0; word < Formula::C; ++word) col_words()[word * TILE + place] = c[word];
    }

    __device__ __forceinline__ void read_rows(RowWords& r) const {
        load_words<Formula::R>(r, shared + in_tile(band(), 0), TILE);
    }
    __device__ __forceinline__ void read_cols(ColWords& c) const {
        load_words<Formula::C>(c, col_words() + in_tile(lane(), 0), TILE);
    }

    // Features k0.. of term I, `count` of them. Neighbouring threads read neighbouring features.
    template <int I>
    __device__ __forceinline__ void fill_chunk(int k0, int count) {
        constexpr int R = Formula::R_WIDTH[I], C = Formula::C_WIDTH[I], T = Formula::T_WIDTH[I];
        AccT* cols = chunk() + R * KC * LINE;
        AccT* thread = cols + C * KC * LINE;
        int k = threadIdx.x % KC;
        if (k >= count) return;
#pragma unroll
        for (int at = threadIdx.x / KC; at < TILE; at += THREADS / KC) {
            AccT rf[AT_LEAST_ONE<R>], cf[AT_LEAST_ONE<C>];
            if (R > 0) Formula::row_feature(Nth<I>(), rf, t, call, l, row(at), k0 + k);
            if (C > 0) Formula::col_feature(Nth<I>(), cf, t, call, l, col(at), k0 + k);
#pragma unroll
            for (int word = 0; word < R; ++word) chunk()[(word * KC + k) * LINE + at] = rf[word];
#pragma unroll
            for (int word = 0; word < C; ++word) cols[(word * KC + k) * LINE + at] = cf[word];
        }
        if (T > 0 && threadIdx.x < KC) {
            AccT tf[AT_LEAST_ONE<T>];
            Formula::thread_feature(Nth<I>(), tf, t, call, l, 0, k0 + k);
#pragma unroll
            for (int word = 0; word < T; ++word) thread[word * KC + k] = tf[word];
        }
    }

    // Adds features k0.. of term I, which are in shared memory.
    template <int I>
    __device__ __forceinline__ void add_chunk(SumsOfPatch& sums, int k0, int count) const {
        constexpr int R = Formula::R_WIDTH[I], C = Formula::C_WIDTH[I], T = Formula::T_WIDTH[I];
        const AccT* rows = chunk() + in_tile(band(), 0);
        const AccT* cols = chunk() + R * KC * LINE + in_tile(lane(), 0);
        const AccT* thread = chunk() + (R + C) * KC * LINE;
        RowWords r;
        ColWords c;
        read_rows(r);
        read_cols(c);
        AccT run[SIDE][SIDE] = {};
#pragma unroll 4
        for (int k = 0; k < count; ++k) {
            AccT rf[SIDE][AT_LEAST_ONE<R>], cf[SIDE][AT_LEAST_ONE<C>], tf[AT_LEAST_ONE<T>];
            load_words<R>(rf, rows + k * LINE, KC * LINE);
            load_words<C>(cf, cols + k * LINE, KC * LINE);
#pragma unroll
            for (int word = 0; word < T; ++word) tf[word] = thread[word * KC + k];
#pragma unroll
            for (int i = 0; i < SIDE; ++i) {
#pragma unroll
                for (int j = 0; j < SIDE; ++j)
                    run[i][j] += Formula::term(Nth<I>(), t, r[i], c[j], tf, rf[i], cf[j], call, l,
                                               row(in_tile(band(), i)), col(in_tile(lane(), j)),
                                               k0 + k);
            }
        }
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
#pragma unroll
            for (int j = 0; j < SIDE; ++j) sums[i][j][I] += run[i][j];
        }
    }

    template <int I = 0>
    __device__ __forceinline__ void add_terms(SumsOfPatch& sums) {
        if constexpr (I < TERMS) {
#pragma unroll 1
            for (int k0 = 0; k0 < call.sizes[I]; k0 += KC) {
                int count = min(call.sizes[I] - k0, KC);
                __syncthreads();
                fill_chunk<I>(k0, count);
                __syncthreads();
                add_chunk<I>(sums, k0, count);
            }
            add_terms<I + 1>(sums);
        }
    }

    // The scores of the thread's pairs, behind a wait for the words of rows. All threads call it.
    __device__ __forceinline__ void compute(AccT (&scores)[SIDE][SIDE]) {
        __syncthreads();
        fill_cols();
        __syncthreads();
        SumsOfPatch sums = {};
        add_terms(sums);
        RowWords r;
        ColWords c;
        read_rows(r);
        read_cols(c);
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
#pragma unroll
            for (int j = 0; j < SIDE; ++j)
                scores[i][j] = Formula::score(t, r[i], c[j], sums[i][j], call, l,
                                              row(in_tile(band(), i)), col(in_tile(lane(), j)));
        }
    }
};
