// How many blocks lie ahead of each tile, in the place of how many it has; and the layout's counts:
// blocks that are stored, and those that the capacity has no room for. One block of threads: 2048
// rows and columns of 32 heads are 16384 tiles.
//
// Facts and struct Fixed: class Scan of kernlib/families/blocksparse/kernels/layout.py.
#pragma once

#include "blocksparse/layout/layout.cuh"

constexpr int EACH = 4;  // tiles a thread takes at a time

struct Operands {
    u32* sums;
    u32* counts;
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_layout_scan(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32* sums = reinterpret_cast<u32*>(shared);
    u32 before = 0;
    for (u32 begin = 0; begin < p.tiles; begin += THREADS * EACH) {
        u32 first = begin + threadIdx.x * EACH, own[EACH], sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            own[i] = first + i < p.tiles ? p.sums[first + i] : 0;
            sum += own[i];
        }
        u32 total, ahead = before + sum_ahead<WARPS>(sum, sums, total);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (first + i < p.tiles) p.sums[first + i] = ahead;
            ahead += own[i];
        }
        before += total;
        __syncthreads();  // `sums` have been read
    }
    if (threadIdx.x == 0) {
        u32 live = min(before, p.capacity);
        p.counts[0] = live;
        p.counts[1] = before - live;
        if (!p.is_marked) p.counts[2] = p.counts[3] = 0;
    }
}
