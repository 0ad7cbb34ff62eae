// Reductions for any number of features: the sums of a tile as in direct/direct.cuh, reduced where
// that stores them. A block walks over the tiles of its TILE rows; two threads share a row, each
// half of a tile's columns, so that their 16-byte reads of sums meet no bank twice and those of v
// are broadcasts.
//
// Floor: 2 issue slots a pair and feature, as for direct/direct.cuh, and 1 + C a pair more.
//
// Facts: class Tile of kernlib/families/pairwise/kernels/reduce.py.
#pragma once

#include "pairwise/reduce/tiles.cuh"

static_assert(sizeof(Reducer) * THREADS <= MATRIX * sizeof(AccT), "reducers meet where sums lie");

__device__ __forceinline__ void fill_weights(AccT* weights, const Parameters& parameters, i64 l,
                                             i64 n0, int columns) {
    if (Reducer::COLUMNS == 0 || threadIdx.x >= columns) return;
    read_weights(weights + threadIdx.x * WEIGHTS, parameters, l, n0 + threadIdx.x);
}

// Takes the thread's share of a finished tile, of which `columns` exist; `base` is the place of its
// first column, `diagonal` that of the row's regularization, in the tile.
__device__ __forceinline__ void take(Reducer& reducer, AccT* total, const AccT* weights,
                                     const Finish& finish, const Points& a, const Points& b,
                                     const Numbers& numbers, int base, int diagonal,
                                     AccT regularization) {
    Rescale rescale(numbers);
    int columns = b.count;
    int row = threadIdx.x % TILE, begin = threadIdx.x / TILE * SHARE;
    mend_share(total, a, b, numbers);
    int end = min(begin + SHARE, columns);
#pragma unroll 1
    for (int column = begin; column < end; column += CHUNK) {
        auto sums = load_vector<AccT, CHUNK>(total + row * LINE + column);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            if (column + e >= end) break;
            AccT value = finish(rescale(sums.element[e]), rescale.unit);
            if (IN_PLACE && column + e == diagonal) value += regularization;
            reducer.add(value, base + column + e, weights + (column + e) * WEIGHTS);
        }
    }
    reducer.settle();
}

// Puts the shares of each row together in its first thread.
__device__ __forceinline__ void gather(Reducer& reducer, AccT* total) {
    Reducer* all = reinterpret_cast<Reducer*>(total);
    __syncthreads();
    all[threadIdx.x] = reducer;
    __syncthreads();
    if (threadIdx.x >= TILE) return;
#pragma unroll 1
    for (int share = 1; share < SHARES; ++share) reducer.merge(all[threadIdx.x + share * TILE]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
pairwise_reduce_tile(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) unsigned char shared[];
    if (!launch.is_needed()) return;
    const Parameters& parameters = launch;
    AccT* stages = reinterpret_cast<AccT*>(shared);
    AccT* total = LONG_K ? stages + 2 * STAGE : stages;
    AccT* weights = stages + SUMS;
    Part part(parameters, TILE);
    i64 m = part.m0 + threadIdx.x % TILE;
    Place place;
#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        ReadScalar read{parameters, l};
        auto a = points_of(parameters.a, parameters.a_view, l, part.m0, parameters.m, parameters.k);
        Reducer reducer(threadIdx.x / TILE * SHARE);
#pragma unroll 1
        for (i64 n0 = part.first; n0 < part.last; n0 += TILE) {
            auto b = points_of(parameters.b, parameters.b_view, l, n0, part.last, parameters.k);
            fill_weights(weights, parameters, l, n0, b.count);
            Numbers numbers = {read(INNER_P), read(INNER_SCALE)};
            sum_tile(total, stages, a, b, place, numbers);
            __syncthreads();
            take(reducer, total, weights, Finish(read), a, b, numbers, int(n0 - part.first),
                 IN_PLACE ? diagonal_place(parameters, m, n0) : 0,
                 IN_PLACE ? read(REGULARIZATION) : AccT(0));
            __syncthreads();
        }
        gather(reducer, total);
        if (threadIdx.x < TILE) store_row(reducer, parameters, part, l, m);
        __syncthreads();
    }
}
