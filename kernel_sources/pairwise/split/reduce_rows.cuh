// A tile of sums to the reducers of its rows, from the registers where wgmma left it: accumulators
// 4c .. 4c+3 of a thread are columns 8c + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8
// of its warp's sixteen. Only a column's PointInfo and line of v pass through shared memory.
#pragma once

#include "pairwise/topk/nearest.cuh"  // ahead of what asks for a reducer's members

#include "pairwise/reduce/reduce.cuh"
#include "pairwise/split/direct.cuh"
#include "pairwise/split/tile.cuh"

constexpr bool ROLLED = Config::ROLLED;  // a tile is reduced in a loop: the code of Finish is long
constexpr bool LISTED = KEPT > 0;        // the reducer is a list of topk/nearest.cuh

// What a thread keeps of its two rows. Functions are templates, as lists have more members than
// other reducers.
template <class R>
struct RowsOf {
    i64 l, m[2];
    PointInfo info[2];
    R reducers[2];
};
using Rows = RowsOf<Reducer>;

// The lists of a thread's rows, of which each has `count` entries, among those of all threads.
template <class R>
__device__ __forceinline__ void begin_lists(RowsOf<R>& rows, u64* lists, int count) {
    if constexpr (LISTED) {
        lists += threadIdx.x - 128;
        rows.reducers[0].begin(lists, count);
        rows.reducers[1].begin(lists + LISTS / 2, count);
    }
}

// Columns n0 .. n0 + columns of which the sums are; `base` is the place of n0 in the block's part.
struct Tile {
    const PointInfo* points;
    const float* weights;
    i64 n0;
    int base, columns;
};

// Two neighbouring columns.
struct Columns {
    Vector<PointInfo, 2> info;
    AccT weights[2 * WEIGHTS];

    __device__ __forceinline__ Columns(const Tile& tile, int column) {
        info = load_vector<PointInfo, 2>(tile.points + column);
        constexpr int COUNT = 2 * Reducer::COLUMNS, EACH = COUNT == 2 ? 2 : 4;
#pragma unroll
        for (int i = 0; i < COUNT; i += EACH) {
            auto read = load_vector<AccT, EACH>(tile.weights + column * Reducer::COLUMNS + i);
#pragma unroll
            for (int e = 0; e < EACH; ++e) weights[i + e] = read.element[e];
        }
    }
};

// The sum of a pair from the product of its words, and both norms.
struct PairSum {
    float value, norms;
    __device__ __forceinline__ PairSum(float product, const PointInfo& left,
                                       const PointInfo& right) {
        norms = left.norm + right.norm;
        value = scaled_sum(product, left.scale, right.scale, norms);
    }
};

// Columns whose code is unrolled, where that of a tile would be long.
constexpr int GROUP = ROLLED ? 32 : 64;

// The accumulators of the first GROUP columns to the end.
__device__ __forceinline__ void rotate(float (&sums)[SUMS]) {
    constexpr int COUNT = GROUP / 2;
    float first[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) first[i] = sums[i];
#pragma unroll
    for (int i = COUNT; i < SUMS; ++i) sums[i - COUNT] = sums[i];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[SUMS - COUNT + i] = first[i];
}

// Values of neighbouring columns, of both rows, that a reducer takes at once.
constexpr int AT_ONCE = 8;

// Takes the sums of a whole tile by groups of AT_ONCE columns of a thread, as add_exponentials()
// has it. Whether none is doubtful.
template <class R>
__device__ __forceinline__ bool reduce_groups(RowsOf<R>& rows, float (&sums)[SUMS],
                                              const Tile& tile, const Finish& finish) {
    constexpr int STEP = ROLLED ? GROUP : TILE_N, PAIRS = AT_ONCE / 2;
    static_assert(STEP / 8 % PAIRS == 0, "whole groups");
    bool fine = true;
#pragma unroll 1
    for (int first = 0; first < TILE_N; first += STEP) {
        int place = first + threadIdx.x % 4 * 2;
#pragma unroll
        for (int c = 0; c < STEP / 8; c += PAIRS) {
            AccT values[AT_ONCE][2];
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                Columns right(tile, place + (c + pair) * 8);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    PairSum sum(sums[(c + pair) * 4 + e], rows.info[e / 2],
                                right.info.element[e % 2]);
                    fine = fine && !is_doubtful(sum.value, sum.norms);
                    values[2 * pair + e % 2][e / 2] =
                        shifted<R>(finish(sum.value), right.weights + e % 2 * R::COLUMNS);
                }
            }
            add_exponentials(rows.reducers, values);
        }
        if (ROLLED) rotate(sums);
    }
    return fine;
}

// Takes what passes of two columns, for which lists may have no room.
template <class R>
__device__ __forceinline__ void take_values(RowsOf<R>& rows, const AccT (&values)[4], int place) {
    bool any = false;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        any |= rows.reducers[e / 2].passes(LARGEST ? -values[e] : values[e]);
    if (!__any_sync(~0u, any)) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) rows.reducers[e / 2].add(values[e], place + e % 2, nullptr);
}

// Takes a tile that exists as a whole. Whether none of the thread's sums is doubtful; what the
// reducers took is worth nothing otherwise.
template <class R>
__device__ __forceinline__ bool reduce_quickly(RowsOf<R>& rows, float (&sums)[SUMS],
                                               const Tile& tile, const Finish& finish) {
    if constexpr (R::GROUPED) return reduce_groups(rows, sums, tile, finish);
    constexpr int STEP = ROLLED ? GROUP : TILE_N;
    bool fine = true;
#pragma unroll 1
    for (int first = 0; first < TILE_N; first += STEP) {
        int place = first + threadIdx.x % 4 * 2;
#pragma unroll
        for (int c = 0; c < STEP / 8; ++c) {
            Columns right(tile, place + c * 8);
            AccT values[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                PairSum sum(sums[c * 4 + e], rows.info[e / 2], right.info.element[e % 2]);
                fine = fine && !is_doubtful(sum.value, sum.norms);
                if constexpr (LISTED) {
                    values[e] = finish(sum.value);
                } else {
                    rows.reducers[e / 2].add(finish(sum.value), tile.base + place + c * 8 + e % 2,
                                             right.weights + e % 2 * R::COLUMNS);
                }
            }
            if constexpr (LISTED) take_values(rows, values, tile.base + place + c * 8);
        }
        if (ROLLED) rotate(sums);
    }
    if constexpr (LISTED) fine = fine && !rows.reducers[0].missed && !rows.reducers[1].missed;
    return fine;
}

// Where the regularization of a thread's rows is, in a tile; added in place or at the end.
struct Diagonal {
    int place[2];
    AccT value;
    __device__ __forceinline__ Diagonal(const Parameters& parameters, const Rows& rows, i64 n0) {
        value = IN_PLACE ? ReadScalar{parameters, rows.l}(REGULARIZATION) : AccT(0);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            place[i] = IN_PLACE ? diagonal_place(parameters, rows.m[i], n0) : -1;
    }
    __device__ __forceinline__ AccT at(int row, int column) const {
        return IN_PLACE && column == place[row] ? value : AccT(0);
    }
};

// Adds a value behind those of later columns. As part of a run, for a row that coincides with
// thousands of points would merge each of them into its total, off by 1.5e-8 of it each time.
template <class R>
__device__ __forceinline__ void add_late(R& reducer, AccT value, const Tile& tile, int column) {
    const float* weights = tile.weights + column * R::COLUMNS;
    if constexpr (LISTED) {
        reducer.add_late(value, tile.base + column);
    } else if constexpr (R::INDEXED) {  // which adds in order
        R one(tile.base + column);
        one.add(value, tile.base + column, weights);
        reducer.merge(one);
    } else {
        reducer.add(value, tile.base + column, weights);
    }
}

// Direct sums of pairs that a warp's threads have flagged, a bit for each accumulator from those
// of column `first` of the tile on; each to the reducer of its row.
__device__ __forceinline__ void reduce_directly(Rows& rows, u32 flags, const Parameters& parameters,
                                                const Tile& tile, const Finish& finish,
                                                const Diagonal& diagonal, int first) {
    u32 lanes = __ballot_sync(~0u, flags);
#pragma unroll 1
    while (lanes) {
        int source = __ffs(lanes) - 1;
        lanes &= lanes - 1;
        u32 waiting = __shfl_sync(~0u, flags, source);
        i64 m[2] = {__shfl_sync(~0u, rows.m[0], source), __shfl_sync(~0u, rows.m[1], source)};
#pragma unroll 1
        while (waiting) {
            int bit = __ffs(waiting) - 1, row = bit / 2 % 2;
            int column = first + bit / 4 * 8 + source % 4 * 2 + bit % 2;
            waiting &= waiting - 1;
            float sum = sum_directly(parameters, rows.l, row ? m[1] : m[0], tile.n0 + column);
            if (threadIdx.x % 32 == source) {
                AccT regularization = row ? diagonal.at(1, column) : diagonal.at(0, column);
                AccT value = finish(sum) + regularization;
                if (row) add_late(rows.reducers[1], value, tile, column);
                else add_late(rows.reducers[0], value, tile, column);
            }
            __syncwarp();
        }
    }
}

// Takes a tile of which columns do not exist, sums are doubtful, or one is on the diagonal,
// GROUP columns at a time.
__device__ __forceinline__ void reduce_carefully(Rows& rows, float (&sums)[SUMS],
                                                 const Parameters& parameters, const Tile& tile,
                                                 const Finish& finish) {
    Diagonal diagonal(parameters, rows, tile.n0);
#pragma unroll 1
    for (int first = 0; first < TILE_N; first += GROUP) {
        if constexpr (LISTED) {
            static_assert(WAITING >= GROUP / 4 || !LISTED, "of what a thread adds meanwhile");
            rows.reducers[0].settle();
            rows.reducers[1].settle();
        }
        u32 flags = 0;
#pragma unroll
        for (int c = 0; c < GROUP / 8; ++c) {
            int place = first + c * 8 + threadIdx.x % 4 * 2;
            Columns right(tile, place);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                int column = place + e % 2;
                if (column >= tile.columns) continue;
                PairSum sum(sums[c * 4 + e], rows.info[e / 2], right.info.element[e % 2]);
                if (is_doubtful(sum.value, sum.norms)) {
                    flags |= u32(rows.m[e / 2] < parameters.m) << (c * 4 + e);
                } else {
                    AccT value = finish(sum.value) + diagonal.at(e / 2, column);
                    rows.reducers[e / 2].add(value, tile.base + column,
                                             right.weights + e % 2 * Reducer::COLUMNS);
                }
            }
        }
        rows.reducers[0].settle();
        rows.reducers[1].settle();
        reduce_directly(rows, flags, parameters, tile, finish, diagonal, first);
        rotate(sums);
    }
}

template <class R>
__device__ __forceinline__ void reduce_tile(RowsOf<R>& rows, float (&sums)[SUMS],
                                            const Parameters& parameters, const Tile& tile,
                                            const Finish& finish, bool crossing) {
    bool fine = false;
    if (tile.columns == TILE_N && !crossing) {
        RowsOf<R> before = rows;
        fine = __all_sync(~0u, reduce_quickly(rows, sums, tile, finish));
        if (!fine) rows = before;
    }
    if (!fine) reduce_carefully(rows, sums, parameters, tile, finish);
    if constexpr (LISTED) {
        constexpr int HALF = WAITING / 2;
        bool room = rows.reducers[0].has_room(HALF) && rows.reducers[1].has_room(HALF);
        if (__all_sync(~0u, room)) return;
    }
    rows.reducers[0].settle();
    rows.reducers[1].settle();
}

// What the lane `step` away has.
template <class T>
__device__ __forceinline__ T from_lane(const T& value, int step) {
    u32 words[sizeof(T) / 4];
    T result;
    memcpy(words, &value, sizeof(T));
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 4); ++i) words[i] = __shfl_xor_sync(~0u, words[i], step);
    memcpy(&result, words, sizeof(T));
    return result;
}

// Puts the four threads of each row together; the first one writes it.
template <class R>
__device__ __forceinline__ void store_rows(RowsOf<R>& rows, const Parameters& parameters,
                                           const Part& part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if constexpr (LISTED) {
            rows.reducers[i].settle();
            if (rows.m[i] >= parameters.m) continue;
            i64 list = part.split * 4 + threadIdx.x % 4;
            i64 at = ((list * parameters.batch + rows.l) * parameters.m + rows.m[i]) *
                     parameters.columns;
            rows.reducers[i].store(parameters.out + at, parameters.indices + at, part.first);
        } else {
            rows.reducers[i].merge(from_lane(rows.reducers[i], 1));
            rows.reducers[i].merge(from_lane(rows.reducers[i], 2));
            if (threadIdx.x % 4 == 0)
                store_row(rows.reducers[i], parameters, part, rows.l, rows.m[i]);
        }
    }
}
