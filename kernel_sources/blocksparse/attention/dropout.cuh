// Which weights a dropout leaves: a function of the seed, the head of all batches, row and column
// alone, so that every kernel, forward and backward, finds the same ones and nobody stores a mask.
//
// Philox 4x32-10 with the seed's two words as its key gives eight numbers of 16 bits for the
// counter (row without bit 3, column without bits 0 and 3, batch * heads + head, 0). That of an
// element is the half `column bit 0`, low half first, of word 2 * (row bit 3) + (column bit 3): a
// lane of mma.sync or wgmma has rows g and g + 8, columns 2t and 2t + 1 and those 8 further on, for
// which one call is enough. An element is dropped if its number is below round(65536 p), and what
// is left is multiplied by 65536 / (65536 - round(65536 p)).
#pragma once

#include "common/types.cuh"

struct Dropout {
    u32 threshold, head, key[2];
    float scale;  // of what is left

    __device__ __forceinline__ Dropout(float p, i64 seed, u32 head) : head(head) {
        threshold = u32(fminf(fmaxf(p, 0.0f), 1.0f) * 65536.0f + 0.5f);
        scale = threshold < 65536 ? 65536.0f / float(65536 - threshold) : 0.0f;
        key[0] = u32(u64(seed));
        key[1] = u32(u64(seed) >> 32);
    }

    // The four words of an element's neighbours.
    __device__ __forceinline__ void words(u32 (&x)[4], int row, int col) const {
        x[0] = u32(row) & ~8u;
        x[1] = u32(col) & ~9u;
        x[2] = head;
        x[3] = 0;
        u32 first = key[0], second = key[1];
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            u64 left = u64(0xd2511f53u) * x[0], right = u64(0xcd9e8d57u) * x[2];
            u32 low = u32(right >> 32) ^ x[1] ^ first, high = u32(left >> 32) ^ x[3] ^ second;
            x[0] = low;
            x[1] = u32(right);
            x[2] = high;
            x[3] = u32(left);
            first += 0x9e3779b9u;
            second += 0xbb67ae85u;
        }
    }
    // Whether the element of an even (0) or odd (1) column is left, by its word.
    __device__ __forceinline__ bool keeps(u32 word, int odd) const {
        return (word >> 16 * odd & 0xffffu) >= threshold;
    }
    // The same of any element, for those that take them one by one.
    __device__ __forceinline__ bool keeps_at(int row, int col) const {
        u32 x[4];
        words(x, row, col);
        u32 upper = row & 8 ? (col & 8 ? x[3] : x[2]) : (col & 8 ? x[1] : x[0]);
        return keeps(upper, col & 1);
    }
};
