// From a chunk in shared memory to left operands of mma.sync (common/mma.cuh), in registers.
//
// A group is 8 rows and 16 columns, half of 32: columns 8t + 4 plane + j, t < 4, j < 4. Lane (g, t)
// owns four of its entries, row g and j = 0 .. 3, which are the columns k of an mma in the order
// 2t, 2t + 1, 2t + 8, 2t + 9. A word of the bitmap is two rows of a group, and has them in bit
// 8j + g % 2 * 4 + t: so a lane's bits lie in bytes, where one multiplication makes selectors for
// prmt of them and one __dp4a counts those before a column. Values lie in the order
// (32 columns, upper or lower 8 rows, plane, g, t, j): what a warp loads at a time is 128
// neighbours.
#pragma once

#include "common/mma.cuh"
#include "sparse/bitmap/chunk.cuh"
#include "sparse/bitmap/instructions.cuh"

using InputT = Config::InputT;  // of values

constexpr u32 BYTES = 0x01010101;

using Fragment = u32[4];

// What a lane needs of its place, worked out once: for each chunk anew it would be 30 instructions.
// The words of rows 2q, 2q + 1 of a block of 32 columns are 16 bytes, of its groups half * 2 +
// plane, and lie at block * 64 + (q ^ block / 2) * 16, which spreads the same q of all blocks over
// the banks.
struct Lane {
    u32 bit, below;       // its first bit in a word, and those of the lanes before it
    u32 counted, unit;    // bytes in a chunk: the word of q = 0 that it counts; its unit of block 0
    u32 counts, ranks;    // the same where the warp's ranks lie
    u32 second, third, fourth;  // factors of its bits for load_four, which are no immediates

    __device__ __forceinline__ Lane(u32 ranks_of_warp) {
        int lane = threadIdx.x % 32;
        bit = lane % 8;  // g % 2 * 4 + t
        below = BYTES * ((1u << bit) - 1);
        counted = lane / 4 * 64 + lane / 8 * 16 + lane % 4 * 4;
        unit = lane / 8 * 16;
        ranks = ranks_of_warp + unit;
        counts = ranks_of_warp + counted;
        second = 0x2, third = 0x202, fourth = 0x20202;
        keep(bit);
        keep(below);
        keep(counted);
        keep(unit);
        keep(ranks);
        keep(counts);
        keep(second);
        keep(third);
        keep(fourth);
    }
};

// Where each word's values begin. A lane counts a group.
__device__ __forceinline__ void make_ranks(u32 chunk, const Lane& lane) {
    u32 words = chunk + lane.counted;
    int count[4], sum = 0;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        count[q] = __popc(load_word(words ^ q * 16));
        sum += count[q];
    }
    u32 at = chunk + BITMAP_BYTES + 2 * (add_before(sum) - sum);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        store_word(lane.counts ^ q * 16, at);
        at += 2 * count[q];
    }
}

// Four neighbouring columns. Byte i of `bits` is 1 where column i has a value, else 0; the values
// lie one behind the other from `at` on.
__device__ __forceinline__ void load_four(u32& left, u32& right, u32 bits, u32 at,
                                          const Lane& lane) {
    u32 second = __dp4a(bits, lane.second, at), third = __dp4a(bits, lane.third, at),
        fourth = __dp4a(bits, lane.fourth, at);
    // The upper half of a loaded register is zero: bytes 2, 3 of the first, 6, 7 of the second.
    u32 select = 0x76327632u - 0x22u * bits;
    left = permute(load_value(at), load_value(second), select);
    right = permute(load_value(third), load_value(fourth), select >> 16);
}

// Adds the products of a chunk's 16 rows and 256 columns with x.
template <class X, int TILES>
__device__ __forceinline__ void add_chunk(float (&sums)[TILES][4], u32 chunk, const X& x,
                                          const Lane& lane) {
    make_ranks(chunk, lane);
    __syncwarp();
    u32 words = chunk + lane.unit;
#pragma unroll
    for (int block = 0; block < CHUNK_COLUMNS / 32; ++block) {
        int swap = block / 2 * 16;
        auto word = load_words((words ^ swap) + block * 64);
        auto rank = load_words((lane.ranks ^ swap) + block * 64);
        Fragment left[2];  // of the planes
#pragma unroll
        for (int group = 0; group < 4; ++group) {
            u32 w = word.element[group];
            u32 at = rank.element[group] + 2 * __popc(w & lane.below);
            Fragment& to = left[group % 2];
            load_four(to[group / 2], to[2 + group / 2], w >> lane.bit & BYTES, at, lane);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const auto& b = x.part[tile][block].element;
            const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
            multiply_fragments<InputT>(sums[tile], left[0], first);
            multiply_fragments<InputT>(sums[tile], left[1], second);
        }
    }
}
