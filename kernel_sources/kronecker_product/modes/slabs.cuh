// Several runs of factors (run.cuh), one behind the other, in one launch: x is cut into slabs of
// rows (of columns, with the factors on the left), and what one run makes of a slab waits for the
// next run in a ring of so few slabs that what waits stays in the L2 cache. Two passes of plain
// copies take 2.0 times the time of one on an H200, through such a ring 1.33 times.
//
// Facts, struct Fixed and AllRuns: class Slabs of
// kernlib/families/kronecker_product/kernels/modes.py.
#pragma once

#include "kronecker_product/modes/run.cuh"
#include "kronecker_product/modes/tickets.cuh"

struct Block {
    const Parameters& p;
    const Finish& finish;
    AccT *tile, *matrices;
    int staged_run;
    i64 staged_batch;

    template <class R>
    __device__ __forceinline__ void stage(i64 batch) {
        R::Modes::stage(matrices, p, batch);
    }
    template <class R>
    __device__ __forceinline__ void compute(const Tile& at) {
        const RunFixed& run = p.runs[R::INDEX];
        load_tile<R>(tile, p, run, p.sources[R::INDEX], at, 0, R::INPUTS);
        wait_for_copies();
        __syncthreads();
        R::Modes::template apply_all<R>(tile, matrices, p, at, finish);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_slabs(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    AccT* tile = reinterpret_cast<AccT*>(shared);
    Finish finish(Read<Parameters>{p});
    Block block{p, finish, tile, tile + TILE, -1, -1};
    AllRuns::stage(block);
    take_tickets<AllRuns>(p, *reinterpret_cast<Taken*>(block.matrices + Config::MATRICES), block);
}
