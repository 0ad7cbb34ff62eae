// The k smallest or largest values of each row, for any number of features: the sums of a tile as
// in direct/direct.cuh, of which two threads a row keep lists, each of one half of the columns.
//
// Floor: 2 issue slots a pair and feature, as for direct/direct.cuh, and 2 a pair more: 100000 x
// 100000 of 64 features take 45 ms at least on an H100.
//
// Facts: class Tile of kernlib/families/pairwise/kernels/topk.py.
#pragma once

#include "pairwise/reduce/tiles.cuh"
#include "pairwise/topk/topk.cuh"

constexpr int PLACES = Config::PLACES;  // lists of a row and split that are written, SHARES or more

// Takes what passes of the thread's share of a finished tile, of which `columns` exist; `base` is
// the place of its first column, `diagonal` that of the row's regularization, in the tile.
__device__ __forceinline__ void take(List& list, AccT* total, const Finish& finish,
                                     const Points& a, const Points& b, const Numbers& numbers,
                                     int base, int diagonal, AccT regularization) {
    Rescale rescale(numbers);
    int row = threadIdx.x % TILE, begin = threadIdx.x / TILE * SHARE;
    mend_share(total, a, b, numbers);
    int end = min(begin + SHARE, b.count);
#pragma unroll 1
    for (int column = begin; column < end; column += CHUNK) {
        auto sums = load_vector<AccT, CHUNK>(total + row * LINE + column);
        bool any = false;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            AccT value = finish(rescale(sums.element[e]), rescale.unit);
            if (IN_PLACE && column + e == diagonal) value += regularization;
            sums.element[e] = LARGEST ? -value : value;
            any |= list.passes(sums.element[e]);
        }
        if (!__any_sync(~0u, any)) continue;
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            if (column + e >= end) break;
            if (list.passes(sums.element[e])) list.push(sums.element[e], base + column + e);
        }
        if (__any_sync(~0u, !list.has_room(CHUNK))) list.settle();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_topk_tile(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) unsigned char shared[];
    if (!launch.is_needed()) return;
    const Parameters& parameters = launch;
    AccT* stages = reinterpret_cast<AccT*>(shared);
    AccT* total = LONG_K ? stages + 2 * STAGE : stages;
    u64* entries = reinterpret_cast<u64*>(stages + SUMS);
    Part part(parameters, TILE);
    i64 m = part.m0 + threadIdx.x % TILE;
    Place place;
#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        ReadScalar read{parameters, l};
        auto a = points_of(parameters.a, parameters.a_view, l, part.m0, parameters.m, parameters.k);
        List list;
        list.begin(entries + threadIdx.x, parameters.columns);
#pragma unroll 1
        for (i64 n0 = part.first; n0 < part.last; n0 += TILE) {
            auto b = points_of(parameters.b, parameters.b_view, l, n0, part.last, parameters.k);
            Numbers numbers = {read(INNER_P), read(INNER_SCALE)};
            sum_tile(total, stages, a, b, place, numbers);
            __syncthreads();
            take(list, total, Finish(read), a, b, numbers, int(n0 - part.first),
                 IN_PLACE ? diagonal_place(parameters, m, n0) : 0,
                 IN_PLACE ? read(REGULARIZATION) : AccT(0));
            __syncthreads();
        }
        list.settle();
        if (m >= parameters.m) continue;
#pragma unroll 1
        for (int place = threadIdx.x / TILE; place < PLACES; place += SHARES) {
            i64 row = ((part.split * PLACES + place) * parameters.batch + l) * parameters.m + m;
            i64 at = row * parameters.columns;
            list.store(parameters.out + at, parameters.indices + at, part.first);
            list.begin(list.entries, parameters.columns);  // of the places that are left nothing
        }
    }
}
