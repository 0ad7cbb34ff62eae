// One run of factors, as modes/modes.cuh has it, in half precision: a tile stays in the dtype of x
// between factors, which halves what passes shared memory, and lets rows of twice the length fit;
// sums are fp32. Each mode rounds once, as torch does between its products. What float16 does not
// hold is scaled by powers of two (scale.cuh).
//
// Floors on an H200: (bytes of x and of out) over 4.3 TB/s; 2 * sum_i features_i * columns_i
// operations a column over 566 TFLOP/s, half of which go to zeros in modes of 8 columns. Of every
// element a mode reads 2 bytes of shared memory and writes 2, at 33 TB/s.
//
// Numbers of fp32 are pairs of half-precision ones (split.cuh), of twice the bytes and three times
// the operations. Reached with 1024 rows, in ms: 8^5 .171 (floors .062 and .044), 32^3 .152 (.062,
// .029), 128^2 .139 (.031, .046); of float16 8^5 .096 (.031, .015), 32^3 .066 (.031, .012), 128^2
// .076 (.016, .015). A block that has a multiprocessor for itself copies, splits, multiplies and
// stores one behind the other, at 2.2 instructions a cycle.
//
// Facts, struct Fixed and Run: class Halves of
// kernlib/families/kronecker_product/kernels/halves.py.
#pragma once

#include "kronecker_product/halves/run.cuh"

__device__ __forceinline__ void one_batch(const Memory& memory, const Parameters& p,
                                          const Finish& finish, i64 batch) {
    const RunFixed& run = p.runs[0];
    i64 index = blockIdx.x;
    if (index >= run.tiles) return;
    bool is_behind = false;
    const Slab whole{batch, batch, 0, true};
    Tile at(run, whole, index, Run::COLUMNS);
    load_tile<Run>(memory.tiles, p, run, p.sources[0], at, 0, Run::INPUTS);
    Run::Modes::template stage<Run>(memory.matrices, memory.scales, p, batch);  // meanwhile
    while (true) {
        i64 following = index + gridDim.x;
        bool is_last = following >= run.tiles;
        Tile next(run, whole, is_last ? index : following, Run::COLUMNS);
        wait_for_copies();
        __syncthreads();
        if (AHEAD && !is_last) read_ahead<Run, false>(memory.tiles, p, next, !is_behind);
        HalfT* tile = memory.tiles + is_behind * AHEAD * WORDS;
        if (SCALED) {
            find_scales<Run>(memory, tile);
            __syncthreads();
        }
        compute_tile<Run>(memory, tile, p, at, finish);
        if (SCALED) clear_columns(memory.scales);
        __syncthreads();
        if (is_last) break;
        if (AHEAD) {
            is_behind = !is_behind;
            read_ahead<Run, true>(memory.tiles, p, next, is_behind);
        } else {
            load_tile<Run>(memory.tiles, p, run, p.sources[0], next, 0, Run::INPUTS);
        }
        at = next;
        index = following;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_halves(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    HalfT* tiles = reinterpret_cast<HalfT*>(shared);
    HalfT *other = tiles + TILE * WORDS, *matrices = tiles + (TILE * TILES + AHEAD) * WORDS;
    Scales& scales = *reinterpret_cast<Scales*>(matrices + Config::MATRICES * WORDS);
    Memory memory{tiles, other, matrices, scales};
    if (SCALED) clear_columns(memory.scales);
    Finish finish(Read<Parameters>{p});
    for (i64 batch = blockIdx.y; batch < p.batches; batch += gridDim.y)
        one_batch(memory, p, finish, batch);
}
