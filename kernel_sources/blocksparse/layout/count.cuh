// The words of a layout, and how many bits each tile of THREADS words has. FROM_MASK, of a mask of
// one byte a block, which is read once; else of words that mark.cuh has made.
//
// Floor: bytes of the mask over 4.3 TB/s. Loads of 32 bytes, 16 in flight for each warp.
//
// Facts and struct Fixed: class Count of kernlib/families/blocksparse/kernels/layout.py.
#pragma once

#include "blocksparse/layout/layout.cuh"

constexpr bool FROM_MASK = Config::FROM_MASK;
constexpr int IN_FLIGHT = 16;

struct Operands {
    const unsigned char* mask;  // (lines, columns)
    u32* words;
    u32* sums;  // of each tile
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// This lane's of the 32 words that begin at `first`.
__device__ __forceinline__ u32 word_of_mask(const Parameters& p, u32 first) {
    u32 lane = threadIdx.x % 32, mine = 0;
    Place at(first, p.words_per_line);
    for (int begin = 0; begin < 32; begin += IN_FLIGHT) {
        unsigned char found[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            u32 column = at.word * 32 + lane;
            bool exists = first + begin + i < p.count && column < p.columns;
            found[i] = exists ? p.mask[at.line * p.columns + column] : 0;
            at.advance(p.words_per_line);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            u32 word = __ballot_sync(ALL_LANES, found[i]);
            if (lane == begin + i) mine = word;
        }
    }
    return mine;
}

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_layout_count(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    u32* sums = reinterpret_cast<u32*>(shared);
    u32 first = first_word(), index = first + threadIdx.x % 32, word = 0;
    if (FROM_MASK) {
        word = word_of_mask(p, first);
        if (index < p.count) p.words[index] = word;
    } else if (index < p.count) {
        word = p.words[index];
    }
    u32 total;
    sum_ahead<WARPS>(__popc(word), sums, total);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = total;
}
