// Reductions of formulas of any number of features: a block has TILE rows and walks over tiles of
// columns. Sums with a unit are products of the scores in shared memory with tiles of the unit, of
// which a block has 16 * SPAN features; other reductions stay in registers, and threads of a row
// put them together in one order.
//
// Floors: a term of K features takes 2 K issue slots a pair, squares of differences, or K,
// products, and a unit of F features F, of 132 SM x 128 lanes x 1.98 GHz of an H200. 16384 x 16384,
// K = F = 64: 1.5 ms. Bytes: each column once a block.
//
// Facts: class Tile of kernlib/families/pairwise/formula/kernels/tile.py.
#pragma once

#include "pairwise/formula/part.cuh"
#include "pairwise/formula/sums.cuh"

constexpr int SPAN = Config::SPAN;           // features of the unit of a thread, 0 without one
constexpr int SPANS = AT_LEAST_ONE<SPAN>;
constexpr int FEATURES = LANES * SPANS;      // of a block
constexpr int UNIT_LINE = FEATURES + PAD;    // of one row or column
constexpr int U = Formula::UNIT < 0 ? 0 : Formula::UNIT;  // its group

__shared__ int ends[2 * THREADS / 32];

// Sums of scores times the unit: shared memory behind that of a tile has the scores, (TILE, LINE)
// with columns first, and the unit's words, (words, TILE, UNIT_LINE) of rows, then of columns, and
// (words, UNIT_LINE) of a thread.
struct Products {
    AccT run[SIDE][SPANS] = {}, total[SIDE][SPANS] = {};
    int f0;  // first feature

    static constexpr int R = Formula::R_WIDTH[U], C = Formula::C_WIDTH[U], T = Formula::T_WIDTH[U];

    static __device__ __forceinline__ AccT* scores_of(const Tile& tile) {
        return tile.chunk() + CHUNK_WORDS;
    }
    static __device__ __forceinline__ AccT* rows_of(const Tile& tile) {
        return scores_of(tile) + TILE * LINE;
    }
    static __device__ __forceinline__ AccT* cols_of(const Tile& tile) {
        return rows_of(tile) + R * TILE * UNIT_LINE;
    }
    static __device__ __forceinline__ AccT* thread_of(const Tile& tile) {
        return cols_of(tile) + C * TILE * UNIT_LINE;
    }
    // Features past the last one are computed as that one and never written.
    __device__ __forceinline__ int feature(const Tile& tile, int f) const {
        return min(f0 + f, tile.call.features - 1);
    }

    // Words of the unit's features of the tile's rows, and of a thread.
    __device__ __forceinline__ void fill_rows(const Tile& tile) const {
        if constexpr (R > 0) {
#pragma unroll 1
            for (int e = threadIdx.x; e < TILE * FEATURES; e += THREADS) {
                int f = e % FEATURES, at = e / FEATURES;
                AccT rf[AT_LEAST_ONE<R>];
                Formula::row_feature(Nth<U>(), rf, tile.t, tile.call, tile.l, tile.row(at),
                                     feature(tile, f));
#pragma unroll
                for (int word = 0; word < R; ++word)
                    rows_of(tile)[(word * TILE + at) * UNIT_LINE + f] = rf[word];
            }
        }
        if constexpr (T > 0) {
            if (threadIdx.x < FEATURES) {
                int f = threadIdx.x;
                AccT tf[AT_LEAST_ONE<T>];
                Formula::thread_feature(Nth<U>(), tf, tile.t, tile.call, tile.l, 0,
                                        feature(tile, f));
#pragma unroll
                for (int word = 0; word < T; ++word)
                    thread_of(tile)[word * UNIT_LINE + f] = tf[word];
            }
        }
    }

    __device__ __forceinline__ void fill_cols(const Tile& tile) const {
        if constexpr (C > 0) {
#pragma unroll 4
            for (int e = threadIdx.x; e < TILE * FEATURES; e += THREADS) {
                int f = e % FEATURES, at = e / FEATURES;
                AccT cf[AT_LEAST_ONE<C>];
                Formula::col_feature(Nth<U>(), cf, tile.t, tile.call, tile.l, tile.col(at),
                                     feature(tile, f));
#pragma unroll
                for (int word = 0; word < C; ++word)
                    cols_of(tile)[(word * TILE + at) * UNIT_LINE + f] = cf[word];
            }
        }
    }

    // Adds the first `count` columns of the tile.
    __device__ __forceinline__ void add(const Tile& tile, const AccT (&scores)[SIDE][SIDE],
                                        int count, const Columns (&columns)[SIDE]) {
        AccT* all = scores_of(tile);
#pragma unroll
        for (int j = 0; j < SIDE; ++j) {
#pragma unroll
            for (int i = 0; i < SIDE; ++i)
                all[in_tile(lane(), j) * LINE + in_tile(band(), i)] = scores[i][j];
        }
        fill_cols(tile);
        __syncthreads();
        RowWords r;
        tile.read_rows(r);
        int first = lane() * SPAN;
#pragma unroll 2
        for (int n = 0; n < count; ++n) {
            AccT weights[SIDE], c[AT_LEAST_ONE<Formula::C>], cf[SPANS][AT_LEAST_ONE<C>];
            load_run(weights, all + n * LINE + in_tile(band(), 0));
#pragma unroll
            for (int word = 0; word < Formula::C; ++word)
                c[word] = tile.col_words()[word * TILE + n];
#pragma unroll
            for (int word = 0; word < C; ++word) {
                AccT values[SPANS];
                load_run(values, cols_of(tile) + (word * TILE + n) * UNIT_LINE + first);
#pragma unroll
                for (int f = 0; f < SPANS; ++f) cf[f][word] = values[f];
            }
#pragma unroll
            for (int i = 0; i < SIDE; ++i) {
                int at = in_tile(band(), i), col = tile.n0 + n;
                bool counts = !RANGED || (col >= columns[i].first && col < columns[i].last);
#pragma unroll
                for (int f = 0; f < SPANS; ++f) {
                    AccT rf[AT_LEAST_ONE<R>], tf[AT_LEAST_ONE<T>];
#pragma unroll
                    for (int word = 0; word < R; ++word)
                        rf[word] = rows_of(tile)[(word * TILE + at) * UNIT_LINE + first + f];
#pragma unroll
                    for (int word = 0; word < T; ++word)
                        tf[word] = thread_of(tile)[word * UNIT_LINE + first + f];
                    AccT unit = Formula::unit(tile.t, r[i], c, tf, rf, cf[f], tile.call, tile.l,
                                              tile.row(at), col, feature(tile, first + f));
                    if (counts) run[i][f] = multiply_add(weights[i], unit, run[i][f]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
#pragma unroll
            for (int f = 0; f < SPANS; ++f) total[i][f] = add_chain(total[i][f], run[i][f]);
        }
    }

    __device__ __forceinline__ void store(const Tile& tile, const Part& part) const {
        const Parameters& call = tile.call;
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            i64 m = i64(tile.m0) + in_tile(band(), i);
            if (m >= call.rows) continue;
            i64 row = (part.split * call.batch + tile.l) * call.rows + m;
#pragma unroll
            for (int f = 0; f < SPANS; ++f) {
                int k = f0 + lane() * SPAN + f;
                if (k < call.features) call.out[row * call.features + k] = total[i][f];
            }
        }
    }
};

// Reducers of rows, each of the columns of one thread.
struct Rows {
    Reducer reducers[SIDE];

    __device__ __forceinline__ void add(const Tile& tile, const AccT (&scores)[SIDE][SIDE],
                                        const Part& part, const Columns (&columns)[SIDE]) {
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
#pragma unroll
            for (int j = 0; j < SIDE; ++j) {
                i64 col = i64(tile.n0) + in_tile(lane(), j);
                if (col >= columns[i].first && col < columns[i].last)
                    reducers[i].add(scores[i][j], int(col - part.first), nullptr);
            }
            reducers[i].settle();
        }
    }

    __device__ __forceinline__ void store(const Tile& tile, const Part& part) {
        constexpr int WORDS = sizeof(Reducer) / sizeof(u32);
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
#pragma unroll
            for (int mask = LANES / 2; mask > 0; mask /= 2) {
                u32 words[WORDS];
                memcpy(words, &reducers[i], sizeof(Reducer));
#pragma unroll
                for (int word = 0; word < WORDS; ++word)
                    words[word] = __shfl_xor_sync(0xffffffffu, words[word], mask);
                Reducer other;
                memcpy(&other, words, sizeof(Reducer));
                reducers[i].merge(other);
            }
            if (lane() == 0)
                store_row(reducers[i], tile.call, part, tile.l,
                          i64(tile.m0) + in_tile(band(), i), 0);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, Config::RESIDENT)
formula_tile(const __grid_constant__ Parameters call) {
    extern __shared__ __align__(128) unsigned char shared[];
    Part part(call, TILE);
#pragma unroll 1
    for (i64 l = blockIdx.y; l < call.batch; l += gridDim.y) {
        Tile tile{call, reinterpret_cast<AccT*>(shared), l, int(part.m0), 0};
        Formula::of_thread(tile.t, call, l);
        Columns columns[SIDE];
        Rows rows;
        Products products;
        products.f0 = part.chunk * FEATURES;
        i64 first = part.first, last = part.last;
        int least = NOWHERE, most = 0;
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {
            columns[i] = columns_of(call, tile.row(in_tile(band(), i)), first, last);
            rows.reducers[i] = reducer_of(columns[i], part.first);
            if (columns[i].first < columns[i].last) {
                least = min(least, columns[i].first);
                most = max(most, columns[i].last);
            }
        }
        if (RANGED) {
            Columns every = columns_of_block<THREADS>(least, most, ends);
            first = every.first, last = every.last;
        }
        __syncthreads();
        tile.fill_rows();
        if (SPAN > 0) products.fill_rows(tile);
#pragma unroll 1
        for (i64 n0 = first; n0 < last; n0 += TILE) {
            tile.n0 = int(n0);
            AccT scores[SIDE][SIDE];
            tile.compute(scores);
            if (SPAN > 0) products.add(tile, scores, int(min(last - n0, i64(TILE))), columns);
            else rows.add(tile, scores, part, columns);
        }
        if (SPAN > 0) products.store(tile, part);
        else rows.store(tile, part);
    }
}
