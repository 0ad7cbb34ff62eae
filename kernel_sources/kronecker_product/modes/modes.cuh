// One run of factors (run.cuh) in one pass over memory, for every GPU since sm_80 and any strides.
//
// Floors on an H200: (bytes of x and of out) over 4.3 TB/s; 2 * sum_i features_i * columns_i
// operations a column over 94 TFLOP/s in 3xTF32, 282 in TF32, 61 in double. Of every element a mode
// reads 4 bytes of shared memory and writes 4, at 33 TB/s.
//
// A block takes tile after tile. Where a multiprocessor holds just one block, nothing else would
// read device memory while it computes: then its tiles lie in turn at the front of shared memory
// and AHEAD elements behind it, and as much of the next one is read ahead as the current one leaves
// free.
//
// Facts, struct Fixed and Run: class Modes of kernlib/families/kronecker_product/kernels/modes.py.
#pragma once

#include "kronecker_product/modes/run.cuh"

__device__ __forceinline__ void one_batch(AccT* tiles, AccT* matrices, const Parameters& p,
                                          const Finish& finish, i64 batch) {
    const RunFixed& run = p.runs[0];
    i64 index = blockIdx.x;
    if (index >= run.tiles) return;
    bool is_behind = false;
    const Slab whole{batch, batch, 0, true};
    Tile at(run, whole, index, Run::COLUMNS);
    load_tile<Run>(tiles, p, run, p.sources[0], at, 0, Run::INPUTS);
    Run::Modes::stage(matrices, p, batch);  // while the tile arrives
    while (true) {
        i64 following = index + gridDim.x;
        bool is_last = following >= run.tiles;
        Tile next(run, whole, is_last ? index : following, Run::COLUMNS);
        wait_for_copies();
        __syncthreads();
        if (AHEAD && !is_last) read_ahead<Run, false>(tiles, p, next, !is_behind);
        Run::Modes::template apply_all<Run>(tiles + is_behind * AHEAD, matrices, p, at, finish);
        if (is_last) break;
        if (AHEAD) {
            is_behind = !is_behind;
            read_ahead<Run, true>(tiles, p, next, is_behind);
        } else {
            load_tile<Run>(tiles, p, run, p.sources[0], next, 0, Run::INPUTS);
        }
        at = next;
        index = following;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_modes(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    AccT* tiles = reinterpret_cast<AccT*>(shared);
    Finish finish(Read<Parameters>{p});
    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y)
        one_batch(tiles, tiles + TILE + AHEAD, p, finish, batch);
}
