// sparse/bitmap/fragments.cuh for values in fewer bits: from codes of a chunk in shared memory to
// left operands of mma.sync. Layout: kernlib/families/sparse/formats/quantised.py.
//
// Lane (g, t) has columns 8t .. 8t + 7 of a block of 32, of rows g and g + 8: of each its codes lie
// one behind the other, in a window of eight bytes from any byte on. Its bits are bit t of each
// nibble of the row's word. A product of these adds up the nibbles before each, so that all eight
// selectors for prmt come of one multiplication: the number of a code among the lane's where the
// bit is set. What becomes of codes is in halves.cuh and, of integers times a single vector, in
// digits.cuh. Scales meet the float sums.
#pragma once

#include "sparse/bitmap/fragments.cuh"
#include "sparse/quantised/codes.cuh"

constexpr u32 NIBBLES = 0x11111111;
constexpr int CODES_OFFSET = BITMAP_BYTES + 32 * GROUPS;

// What a lane needs of its place. The word of row r and block b is number
// (b / 2 * 8 + (r % 8 ^ b / 2)) * 4 + b % 2 * 2 + r / 8: two rows of two blocks are 16 bytes, and
// the words that lanes count lie in banks of their own.
struct CodeLane {
    u32 bit, below;  // t, and the bits of the lanes before it
    u32 upper;       // bits by which to shift a word for those of the last four columns
    // Bytes in a chunk and in the warp's ranks, which lie at multiples of 128: of the words of rows
    // that it counts, and of its own words in each two blocks.
    u32 counted[4], unit[4];
    u32 ranks;
    u32 mask, upper_mask, sixteen;  // constants that are no immediates

    __device__ __forceinline__ CodeLane(u32 ranks_of_warp) {
        int lane = threadIdx.x % 32, block = lane / 2 % 8;
        bit = CODES == INT4 ? 1u << (3 - lane % 4) : lane % 4;
        upper = lane % 4 + 16;
        below = NIBBLES * ((1u << lane % 4) - 1);
        u32 first = block / 2 * 144 + lane % 2 * 64 + block % 2 * 8 + lane / 16 * 4;
        u32 own = lane / 4 * 16;
        keep(first);
        keep(own);
        ranks = ranks_of_warp;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            counted[i] = first ^ i * 16;
            unit[i] = own ^ i * 16;
        }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1200
        // By way of shuffles, else the compiler would make the last three of the first for each
        // chunk. For sm_120 it spills registers instead.
        ranks = uniform(ranks);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            counted[i] = __shfl_sync(~0u, counted[i], lane);
            unit[i] = __shfl_sync(~0u, unit[i], lane);
        }
#endif
        mask = 0x000f000f * gridDim.y, upper_mask = 0x00f000f0 * gridDim.y, sixteen = 16;
        keep(bit);
        keep(below);
        keep(upper);
    }
};

// Where the codes of each row and block begin, an address. They come in the order (half of the
// rows, block, row, column), of which a lane counts four rows; those of 4 bits lie in the upper
// nibbles of the same bytes for the lower half.
__device__ __forceinline__ void make_ranks(u32 chunk, const CodeLane& lane) {
    int count[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        count[i] = __popc(load_word(chunk + lane.counted[i]));
        sum += count[i];
    }
    u32 before = (CODES == INT4 ? add_before_in_half(sum) : add_before(sum)) - sum;
    u32 at = chunk + CODES_OFFSET + before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        store_word(lane.ranks + lane.counted[i], at);
        at += count[i];
    }
}

// What stands for a column without an entry: q = 0 of int8, 0 of e4m3.
constexpr u32 ZERO = CODES == INT8 ? 0x80808080 : 0;

// The codes of eight columns, a byte each, from those that lie from byte `at` on: ZERO, or the code
// 0, where a bit is not set.
__device__ __forceinline__ void load_eight(u32 (&codes)[2], u32 word, u32 at, int half,
                                           const CodeLane& lane) {
    u32 from = at & ~3u, shift = at * 8 + (CODES == INT4 ? half * 4 : 0);
    u32 a = load_constant_word(from), b = load_constant_word(from + 4),
        c = load_constant_word(from + 8);
    u32 low = funnel(a, b, shift), high = funnel(b, c, shift);
    if constexpr (CODES == INT4) {
        low &= 0x0f0f0f0f, high &= 0x0f0f0f0f;
        // 8 + rank where the bit is not set: the sign of a byte below 128.
        u32 select = (word * lane.bit & 8 * NIBBLES) * 0x02222221 + 8 * NIBBLES;
        codes[0] = permute(low, high, select);
        codes[1] = permute(low, high, select >> 16);
        return;
    }
    u32 present = word >> lane.bit & NIBBLES;
    // The first four take ZERO where the bit is not set: 4 + rank.
    u32 select = present * 0x1111110c + 4 * NIBBLES;
    codes[0] = permute(low, ZERO, select);
    if constexpr (CODES == FP8) {
        // The others 8 + rank: the sign of a byte, of which the sign bit stays, 0 or -0. So it does
        // of 0x7f, which makes a mask of all other bits.
        u32 others = (present * 0x11111108 + 8 * NIBBLES) >> 16;
        u32 mask = permute(0x7f7f7f7f, 0x7f7f7f7f, others);
        codes[1] = permute(low, high, others) & (mask | 0x80808080);
    } else {
        u32 mask = permute(0xff00ff00, 0xff00ff00, word >> lane.upper);
        codes[1] = (permute(low, high, select >> 16) & mask) | (ZERO & ~mask);
    }
}
