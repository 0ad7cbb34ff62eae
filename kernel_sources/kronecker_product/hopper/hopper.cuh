// Products with one factor or two neighbouring ones in one pass over memory, by wgmma (sm_90a).
// Small factors are merged, or repeated along a diagonal, to matrices of 64 or 128.
//
// A tile is a matrix X of LINES x COLUMNS numbers of one row. The first factors' product is
// D = F1^T X, with X in shared memory as it arrives; the second's, along the columns, is D F2, with
// D from the registers that hold it: as accumulators and as left operand of wgmma a thread has the
// same numbers. So what lies between two factors never leaves registers, and a tile passes shared
// memory once. Each 64 lines have a warpgroup; a multiprocessor has several tiles at work, and the
// next of each is on its way (stages.cuh).
//
// Floors on an H200: (bytes of x and of out) over 4.3 TB/s a pass; 2 * 64 operations a number and
// matrix over 888 TFLOP/s (2 * 128 of 128 lines or columns), three times that for fp32.
//
// Facts, struct Fixed, Run and AllMatrices: class Hopper of
// kernlib/families/kronecker_product/kernels/hopper.py.
#pragma once

#include "kronecker_product/hopper/tile.cuh"

// Tiles of one group after another; few tiles are of as many blocks.
struct Stride {
    const u32 tiles;
    u32 tile;
    __device__ __forceinline__ Stride(const Parameters& p, int group)
        : tiles(u32(p.runs[0].tiles)), tile(group * gridDim.x + blockIdx.x) {}
    __device__ __forceinline__ Taken next() {
        const Taken taken{tile < tiles ? 0 : -1, 0, tile, 0};
        tile += gridDim.x * GROUPS;
        return taken;
    }
};

// With columns of x behind its features, tiles of the same features are neighbours.
template <class R>
__device__ __forceinline__ Origin origin_of(const Parameters& p, const Taken& taken) {
    if (R::INSIDE) {
        const u32 across = u32((p.runs[0].columns + R::COLUMNS - 1) / R::COLUMNS);
        const i64 column = i64(taken.tile % across) * R::COLUMNS;
        return {column, column, column, feature_of_tile<R>(taken.tile / across)};
    }
    const i64 row = taken.tile / R::ROW_TILES;
    return {row, row, row, feature_of_tile<R>(taken.tile % R::ROW_TILES)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_product_hopper(const __grid_constant__ Parameters p) {
    run_block<Stride, Run>(p);
}
