// Products of fragments, added up.
//
// The tensor core truncates what it accumulates. With SPLIT (3xTF32) that would count, so its sums
// start anew every 8 terms and are added up outside, in chains of CHAIN terms: in an emulation of
// the hardware a chain of 800 additions is off by 5e-7, chains of 128 by 2.6e-7.
#pragma once

#include "blocksparse/operand.cuh"

// Of the result, that a warp adds up at a time.
constexpr int WARP_LINES = Config::WARP_LINES, WARP_COLUMNS = Config::WARP_COLUMNS;
constexpr int PRODUCTS = Config::PRODUCTS;  // of one multiplication: 1, or 3 for fp32 by 3xTF32
constexpr int FRAGMENTS = WARP_LINES / 16, PAIRS = WARP_COLUMNS / 16;  // of left, of right
constexpr bool SPLIT = PRODUCTS == 3;
constexpr int CHAIN = 1024;

using Sums = float[FRAGMENTS][2 * PAIRS][4];

// An element as the tensor core takes it.
__device__ __forceinline__ void prepare(u32 x, u32& word, u32& low) {
    if (SPLIT) split_to_tf32(x, word, low);
    else word = sizeof(InputT) == 4 ? round_to_tf32(x) : x;
}

// What a warp holds of the right operand: all its columns by 32 bytes of depth.
struct Right {
    u32 word[2 * PAIRS][2], low[2 * PAIRS][2];

    template <class R>
    __device__ __forceinline__ void read(const R& reader, const unsigned char* stage, int first,
                                         int step) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            u32 x[4];
            reader.read(x, stage, first + pair, step);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                prepare(x[i], word[2 * pair + i / 2][i % 2], low[2 * pair + i / 2][i % 2]);
        }
    }
};

// Adds the products of 16 lines.
__device__ __forceinline__ void add_products(float (&sums)[2 * PAIRS][4], const u32 (&left)[4],
                                             const Right& b) {
    u32 a[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) prepare(left[i], a[i], low[i]);
    if constexpr (SPLIT) {  // the small products first, while the sums are small
        float few[2 * PAIRS][4] = {};
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(few[j], low, b.word[j]);
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(few[j], a, b.low[j]);
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(few[j], a, b.word[j]);
#pragma unroll
        for (int i = 0; i < 8 * PAIRS; ++i) sums[i / 4][i % 4] += few[i / 4][i % 4];
    } else {
#pragma unroll
        for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(sums[j], a, b.word[j]);
    }
}

// Ends a chain.
__device__ __forceinline__ void promote(Sums& total, Sums& sums) {
#pragma unroll
    for (int i = 0; i < FRAGMENTS * 8 * PAIRS; ++i) {
        float& chain = sums[i / (8 * PAIRS)][i / 4 % (2 * PAIRS)][i % 4];
        total[i / (8 * PAIRS)][i / 4 % (2 * PAIRS)][i % 4] += chain;
        chain = 0;
    }
}
