// Tiles of sums whose rows two threads share: what reduce/tile.cuh and topk/tile.cuh share.
#pragma once

#include "pairwise/reduce/launch.cuh"
#include "pairwise/reduce/reduce.cuh"
#include "pairwise/tile.cuh"

constexpr int SHARES = THREADS / TILE;  // threads of a row
constexpr int SHARE = TILE / SHARES;    // neighbouring columns of a thread
constexpr int MATRIX = TILE * LINE;     // sums of a tile
constexpr int SUMS = LONG_K ? MATRIX + 2 * STAGE : (MATRIX > 2 * STAGE ? MATRIX : 2 * STAGE);

__device__ __forceinline__ Points points_of(const InputT* data, const View& view, i64 l, i64 first,
                                            i64 count, int k) {
    return {data + l * view.batch_stride + first * view.row_stride, view.row_stride,
            view.column_stride, int(min(count - first, i64(TILE))), k};
}

// Computes anew what of the thread's share of a finished tile has to be.
__device__ __forceinline__ void mend_share(AccT* total, const Points& a, const Points& b,
                                           const Numbers& numbers) {
    auto own = [](int index) {
        return int(threadIdx.x) % TILE * LINE + int(threadIdx.x) / TILE * SHARE + index * CHUNK;
    };
    mend_tile<SHARE / CHUNK, CHUNK>(total, LINE, own, a, b, numbers.p);
}
