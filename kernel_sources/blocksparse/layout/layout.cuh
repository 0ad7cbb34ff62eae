// Words of a layout's lines: bit c % 32 of word c / 32 of a line says whether block c is stored.
// A warp takes 32 words one behind the other, and a block of threads a tile of them.
#pragma once

#include "blocksparse/sums.cuh"

constexpr int THREADS = Config::THREADS, WARPS = THREADS / 32;

// Where a word lies: its line, and which of that line's it is.
struct Place {
    u32 line, word;
    __device__ __forceinline__ Place(u32 index, u32 words) {
        line = index / words;
        word = index - line * words;
    }
    __device__ __forceinline__ void advance(u32 words) {
        if (++word == words) {
            word = 0;
            ++line;
        }
    }
};

// The first word of this thread's warp.
__device__ __forceinline__ u32 first_word() {
    return blockIdx.x * THREADS + threadIdx.x / 32 * 32;
}
