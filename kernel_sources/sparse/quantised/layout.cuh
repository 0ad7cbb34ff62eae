// Where bits, scales and codes of a chunk lie, for the kernels that make and undo them. Layout:
// kernlib/families/sparse/formats/quantised.py.
//
// Words are counted in the order of codes, (half of the rows, block, row). A warp takes 32 of them,
// a lane a column of the block.
#pragma once

#include "common/types.cuh"
#include "sparse/bitmap/chunk.cuh"
#include "sparse/quantised/codes.cuh"

constexpr int BLOCK = 32;  // columns
constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr u32 NIBBLES = 0x11111111, WARP = 0xffffffff;

// A chunk as it lies in memory.
struct alignas(16) Chunk {
    u32 words[WORDS];
    u16 scales[8][GROUPS][2];  // of rows g and g + 8
    unsigned char codes[CODES == INT4 ? POSITIONS / 2 : POSITIONS];
};

// The row and block of a word, and where it lies.
struct Place {
    int half, block, g;
    __device__ __forceinline__ Place(int word)
        : half(word / 64), block(word / 8 % 8), g(word % 8) {}
    __device__ __forceinline__ int row() const { return half * 8 + g; }
    __device__ __forceinline__ int group() const { return block * GROUPS / 8; }
    __device__ __forceinline__ int word() const {
        return (block / 2 * 8 + (g ^ block / 2)) * 4 + block % 2 * 2 + half;
    }
};

// The bit of a column of a block, and those of the columns before it.
__device__ __forceinline__ int bit_of(int column) { return column % 8 * 4 + column / 8; }
__device__ __forceinline__ u32 below(int column) {
    int t = column / 8;
    return NIBBLES * ((1u << t) - 1) | ((NIBBLES << t) & ((1u << bit_of(column)) - 1));
}

// How many codes lie before those of each word: in 4 bits, of the word's half of the rows. By the
// first warp, of which a lane counts four words.
__device__ __forceinline__ void make_begins(u32 (&begins)[WORDS], const u32 (&words)[WORDS]) {
    int lane = threadIdx.x % 32;
    u32 count[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        count[i] = __popc(words[Place(lane * 4 + i).word()]);
        sum += count[i];
    }
    u32 end = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 before = __shfl_up_sync(WARP, end, step);
        if (lane >= step) end += before;
    }
    u32 upper = __shfl_sync(WARP, end, 15), at = end - sum;
    if (CODES == INT4 && lane >= 16) at -= upper;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        begins[lane * 4 + i] = at;
        at += count[i];
    }
}
