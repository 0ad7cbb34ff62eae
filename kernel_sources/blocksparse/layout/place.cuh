// The slots of a layout: rows and columns of its blocks in order, -1 behind them, and the slot at
// which each word begins. Bits of blocks that the capacity has no room for are cleared.
//
// Facts and struct Fixed: class Place of kernlib/families/blocksparse/kernels/layout.py.
#pragma once

#include "blocksparse/layout/layout.cuh"

struct Operands {
    const u32* ahead;  // blocks ahead of each tile
    const u32* counts;
    u32* words;
    u32* ranks;
    int* rows;
    int* cols;
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// The lowest `most` of the bits that are set.
__device__ __forceinline__ u32 lowest_bits(u32 bits, u32 most) {
    while (u32(__popc(bits)) > most) bits &= ~(1u << (31 - __clz(int(bits))));
    return bits;
}

// The blocks of a warp's words, a word at a time, so that lanes store side by side.
__device__ __forceinline__ void put_slots(const Parameters& p, u32 first, u32 bits, u32 rank) {
    u32 lane = threadIdx.x % 32;
    Place at(first, p.words_per_line);
    for (int i = 0; i < 32; ++i) {
        u32 word = __shfl_sync(ALL_LANES, bits, i), begin = __shfl_sync(ALL_LANES, rank, i);
        if (word >> lane & 1) {
            u32 slot = begin + __popc(word & ((1u << lane) - 1));
            p.rows[slot] = int(at.line);
            p.cols[slot] = int(at.word * 32 + lane);
        }
        at.advance(p.words_per_line);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_layout_place(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32* sums = reinterpret_cast<u32*>(shared);
    if (blockIdx.x < p.tiles) {
        u32 first = first_word(), index = first + threadIdx.x % 32, total;
        u32 bits = index < p.count ? p.words[index] : 0;
        u32 rank = p.ahead[blockIdx.x] + sum_ahead<WARPS>(__popc(bits), sums, total);
        rank = min(rank, p.capacity);
        bits = lowest_bits(bits, p.capacity - rank);
        if (index < p.count) {
            p.words[index] = bits;
            p.ranks[index] = rank;
        }
        put_slots(p, first, bits, rank);
    }
    i64 step = i64(gridDim.x) * THREADS;
    for (i64 slot = p.counts[0] + i64(blockIdx.x) * THREADS + threadIdx.x; slot < p.capacity;
         slot += step)
        p.rows[slot] = p.cols[slot] = -1;
}
