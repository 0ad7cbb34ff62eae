// Several runs of factors in one launch, as modes/slabs.cuh has it, in half precision. float16 goes
// from run to run as it is scaled, with the exponent that each column of a tile was scaled by.
//
// Facts, struct Fixed and AllRuns: class HalfSlabs of
// kernlib/families/kronecker_product/kernels/half_slabs.py.
#pragma once

#include "kronecker_product/halves/handed.cuh"
#include "kronecker_product/modes/tickets.cuh"

struct Block {
    const Parameters& p;
    const Finish& finish;
    Memory memory;
    int staged_run;
    i64 staged_batch;

    template <class R>
    __device__ __forceinline__ void stage(i64 batch) {
        R::Modes::template stage<R>(memory.matrices, memory.scales, p, batch);
        if (SCALED) clear_columns(memory.scales);
    }
    template <class R>
    __device__ __forceinline__ void compute(const Tile& at) {
        load_tile<R>(memory.tiles, p, p.runs[R::INDEX], p.sources[R::INDEX], at, 0, R::INPUTS);
        wait_for_copies();
        __syncthreads();
        if constexpr (SCALED) {
            if constexpr (R::WRITTEN_HERE && POWERS > 0)
                level<R>(memory.scales, memory.tiles, p, at, at.slab);
            else find_scales<R>(memory, memory.tiles);
            __syncthreads();
        }
        compute_tile<R>(memory, memory.tiles, p, at, finish);
        if constexpr (SCALED) {
            if constexpr (!R::ENDS && POWERS > 0) hand_on<R>(memory.scales, p, at, at.slab);
            clear_columns(memory.scales);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_half_slabs(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    HalfT* tiles = reinterpret_cast<HalfT*>(shared);
    HalfT *other = tiles + TILE * WORDS, *matrices = tiles + TILE * TILES * WORDS;
    Taken& taken = *reinterpret_cast<Taken*>(matrices + Config::MATRICES * WORDS);
    Scales& scales = *reinterpret_cast<Scales*>(&taken + 1);
    Finish finish(Read<Parameters>{p});
    Block block{p, finish, {tiles, other, matrices, scales}, -1, -1};
    AllRuns::stage(block);
    take_tickets<AllRuns>(p, taken, block);
}
