// The words of columns of those of rows: each warp turns one tile of 32 x 32 bits.
//
// Facts and struct Fixed: class Turn of kernlib/families/blocksparse/kernels/layout.py.
#pragma once

#include "blocksparse/layout/layout.cuh"

struct Operands {
    const u32* row_words;
    u32* col_words;
};
struct Parameters : Operands, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Bit i of lane j's word, of bit j of lane i's: squares beside the diagonal change places, of 16
// bits, then 8, down to one.
__device__ __forceinline__ u32 turned(u32 word) {
    u32 lane = threadIdx.x % 32, low = 0xffff;
#pragma unroll
    for (u32 apart = 16; apart; apart /= 2) {
        u32 other = __shfl_xor_sync(ALL_LANES, word, int(apart));
        word = lane & apart ? (word & ~low) | (other >> apart & low)
                            : (word & low) | (other & low) << apart;
        low ^= low << apart / 2;
    }
    return word;
}

extern "C" __global__ void __launch_bounds__(THREADS)
blocksparse_layout_turn(const __grid_constant__ Parameters p) {
    u32 tile = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (tile >= p.tiles) return;
    u32 across = tile % p.words_per_row, line = tile / p.words_per_row;
    u32 down = line % p.words_per_col, head = line / p.words_per_col;
    u32 row = down * 32 + lane, col = across * 32 + lane, word = 0;
    if (row < p.grid_rows)
        word = p.row_words[(head * p.grid_rows + row) * p.words_per_row + across];
    word = turned(word);
    if (col < p.grid_cols)
        p.col_words[(head * p.grid_cols + col) * p.words_per_col + down] = word;
}
