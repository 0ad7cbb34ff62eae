// Products with one factor or two neighbouring ones in one pass over memory, by wgmma (sm_90a).
// Small factors are merged, or repeated along a diagonal, to matrices of 64 or 128.
//
// A tile is a matrix X of LINES x COLUMNS numbers of one row. The first factors' product is
// D = F1^T X, with X in shared memory as it arrives; the second's, along the columns, is D F2, with
// D from the registers that hold it: as accumulators and as left operand of wgmma a thread has the
// same numbers. So what lies between two factors never leaves registers, and a tile passes shared
// memory once. Each 64 lines have a warpgroup; a multiprocessor has several tiles at work, which
// wait for nothing but its matrix unit, and each has asked for its next tile before it multiplies.
//
// Floors on an H200: (bytes of x and of out) over 4.3 TB/s a pass; 2 * 64 operations a number and
// matrix over 888 TFLOP/s (2 * 128 of 128 lines or columns), three times that for fp32.
//
// The generated source defines, beside what panel.cuh, multiply.cuh and tile.cuh ask for, before it
// includes this file:
//   Run                          the only run
#pragma once

#include "kronecker_product/hopper/tile.cuh"

// With columns of x behind its features, tiles of the same features are neighbours.
__device__ __forceinline__ Origin origin_of(const RunFixed& run, u32 index) {
    if (Run::INSIDE) {
        const u32 across = u32((run.columns + Run::COLUMNS - 1) / Run::COLUMNS);
        const i64 column = i64(index % across) * Run::COLUMNS;
        return {column, column, column, feature_of_tile<Run>(index / across)};
    }
    const i64 row = index / Run::ROW_TILES;
    return {row, row, row, feature_of_tile<Run>(index % Run::ROW_TILES)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_product_hopper(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Shared s(shared);
    const RunFixed& run = p.runs[0];
    const u32 tiles = u32(run.tiles), step = gridDim.x * GROUPS;
    u32 index = group_number() * gridDim.x + blockIdx.x;  // few tiles are of as many blocks
    Numbers numbers;
    if (index < tiles) numbers.load<Run>(p, origin_of(run, index));
    stage_all<Run>(p, s);
    const Finish finish(Read<Parameters>{p});
#pragma unroll 1
    for (int turn = 0; index < tiles; turn ^= 1, index += step) {
        const Undo<Run> undo = write_tile<Run>(numbers, s, turn, [] {});
        if (index + step < tiles) numbers.load<Run>(p, origin_of(run, index + step));
        compute_tile<Run>(p, finish, s, origin_of(run, index), undo, [] {});
    }
}
