// The first k entries of several lists of each row, all of them in order: a thread finds the rank
// of one entry among those of all lists, by its place in its own and a search in each other, and
// writes it there. Most are behind k after a few lists.
//
// Facts and struct Fixed: class Merge of kernlib/families/pairwise/kernels/topk.py.
#pragma once

#include "pairwise/topk/keys.cuh"

constexpr int THREADS = Config::THREADS;

struct Operands {
    const float* values;  // (lists, rows, k)
    const i64* places;    // -1 where there is no entry, behind all others
    float* out;
    i64* indices;
};

struct Parameters : Operands, Fixed {};

struct Found {
    u32 key;
    i64 place;

    __device__ __forceinline__ Found(const Parameters& parameters, i64 at)
        : key(key_of(LARGEST ? -parameters.values[at] : parameters.values[at])),
          place(parameters.places[at]) {}

    // In the order of topk/topk.cuh.
    __device__ __forceinline__ bool is_before(const Found& other) const {
        if (place < 0 || other.place < 0) return place >= 0;
        return key != other.key ? key < other.key : place < other.place;
    }
};

// How many entries of the list that begins at `first` are before another.
__device__ __forceinline__ int count_before(const Parameters& parameters, i64 first,
                                            const Found& other) {
    int low = 0, high = parameters.k;
#pragma unroll 1
    while (low < high) {
        int middle = (low + high) / 2;
        if (Found(parameters, first + middle).is_before(other)) low = middle + 1;
        else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_topk_merge(const __grid_constant__ Parameters parameters) {
    i64 rows = parameters.rows, at = i64(blockIdx.x) * THREADS + threadIdx.x;
    int k = parameters.k;
    if (at >= parameters.lists * rows * k) return;
    i64 row = at / k % rows;
    int own = int(at / k / rows), rank = int(at % k);
    Found found(parameters, at);
    if (found.place < 0) return;
#pragma unroll 1
    for (int list = 0; list < parameters.lists && rank < k; ++list) {
        if (list != own) rank += count_before(parameters, (list * rows + row) * k, found);
    }
    if (rank >= k) return;
    parameters.out[row * k + rank] = parameters.values[at];
    parameters.indices[row * k + rank] = found.place;
}
