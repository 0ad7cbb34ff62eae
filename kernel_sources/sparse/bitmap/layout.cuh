// Where bits and values of a chunk lie, for the kernels that make and undo them. Layout:
// kernlib/families/sparse/formats/bitmap.py.
//
// A warp takes 4 rows of a chunk, two pairs that share words. Lane l has columns 8 l .. 8 l + 7,
// which are t = l % 4 of block l / 4: its lower four are those of plane 0, its upper four of 1.
#pragma once

#include "common/types.cuh"
#include "sparse/bitmap/chunk.cuh"

using BitsT = Config::BitsT;     // an integer as wide as values

constexpr int WIDTH = 8;         // columns of a lane
constexpr int WARP_ROWS = 4;     // of a warp
constexpr int CHUNK_THREADS = 32 * CHUNK_ROWS / WARP_ROWS;
constexpr int PAIRS = WARP_ROWS / 2;
constexpr u32 BYTES = 0x01010101;
constexpr u32 WARP = 0xffffffff;

// A chunk as it lies in memory.
struct alignas(16) Chunk {
    u32 words[WORDS];
    BitsT values[POSITIONS];
};

constexpr int PER_ACCESS = 16 / sizeof(BitsT);

// A lane's columns of a row.
union Piece {
    Vector<BitsT, PER_ACCESS> part[WIDTH / PER_ACCESS];
    u32 word[WIDTH * sizeof(BitsT) / 4];
    __device__ __forceinline__ BitsT& operator[](int e) {
        return part[e / PER_ACCESS].element[e % PER_ACCESS];
    }
};

// The word of a pair of rows, of 8, in plane 0 of a block; that of plane 1 is the next. By the
// exclusive or, the same pair of all blocks lies in different banks.
__device__ __forceinline__ int word_of(int pair, int block) {
    return (block * 4 + (pair % 4 ^ block / 2)) * 4 + pair / 4 * 2;
}

// A lane's bits, and where its values lie among those of the chunk. Values come in 32 groups: of a
// block of columns, rows 0-7 or 8-15, a plane; each is four words. All lanes of a warp build it
// together, each counting one group.
struct Ranks {
    u32 word[PAIRS][2], begin[PAIRS][2];  // of pairs and planes: bits, and their first value
    u32 total;                            // values of the chunk

    __device__ __forceinline__ Ranks(const u32* words, int warp) {
        int lane = threadIdx.x % 32, block = lane / 4;
        u32 count[2] = {};
#pragma unroll
        for (int q = 0; q < 4; ++q)
            count[q / 2] += __popc(words[word_of(q, block) + lane % 4]);
        u32 all = count[0] + count[1], end = all;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            u32 before = __shfl_up_sync(WARP, end, step);
            if (lane >= step) end += before;
        }
        total = __shfl_sync(WARP, end, 31);
        u32 first = end - all + (warp % 2 ? count[0] : 0);  // the warp's rows are 4-7 of the group
        u32 next[2];
#pragma unroll
        for (int plane = 0; plane < 2; ++plane)
            next[plane] = __shfl_sync(WARP, first, block * 4 + warp / 2 * 2 + plane);
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            auto both = load_vector<u32, 2>(words + word_of(warp * PAIRS + pair, block));
#pragma unroll
            for (int plane = 0; plane < 2; ++plane) {
                word[pair][plane] = both.element[plane];
                begin[pair][plane] = next[plane];
                next[plane] += __popc(both.element[plane]);
            }
        }
    }

    // Of a row of the warp: bit 8 j is whether column j of the plane has a value.
    __device__ __forceinline__ u32 bits(int row, int plane) const {
        return word[row / 2][plane] >> shift(row);
    }

    // And where the first of these values lies.
    __device__ __forceinline__ u32 at(int row, int plane) const {
        u32 below = BYTES * ((1u << shift(row)) - 1);
        return begin[row / 2][plane] + __popc(word[row / 2][plane] & below);
    }

    __device__ static __forceinline__ int shift(int row) { return row % 2 * 4 + threadIdx.x % 4; }
};
