// sparse/bitmap/fragments.cuh for values in fewer bits: from codes of a chunk in shared memory to
// left operands of mma.sync. Layout: kernlib/families/sparse/formats/quantised.py.
//
// Lane (g, t) has columns 8t .. 8t + 7 of a block of 32, of rows g and g + 8: of each its codes lie
// one behind the other, in a window of eight bytes from any byte on. Its bits are bit t of each
// nibble of the row's word. A product of these adds up the nibbles before each, so that all eight
// selectors for prmt come of one multiplication: the number of a code among the lane's where the
// bit is set. Codes become halves that hold them exactly; scales meet the float sums.
#pragma once

#include "sparse/bitmap/quantised/kinds.cuh"

constexpr u32 NIBBLES = 0x11111111;
constexpr int GROUPS = CODES == INT4 ? 2 : 1;  // of columns, which share a scale
constexpr int CODES_OFFSET = BITMAP_BYTES + 32 * GROUPS;

using Fragment = u32[4];

// What a lane needs of its place. The word of row r and block b is number
// (b / 2 * 8 + (r % 8 ^ b / 2)) * 4 + b % 2 * 2 + r / 8: two rows of two blocks are 16 bytes, and
// the words that lanes count lie in banks of their own.
struct Lane {
    u32 bit, below;     // t, and the bits of the lanes before it
    u32 upper;          // bits by which to shift a word for those of the last four columns
    u32 counted, unit;  // bytes in a chunk: the word of the first row that it counts; its own
    u32 counts, ranks;  // the same where the warp's ranks lie
    u32 mask, upper_mask, sixteen;  // constants that are no immediates

    __device__ __forceinline__ Lane(u32 ranks_of_warp) {
        int lane = threadIdx.x % 32, block = lane / 2 % 8;
        bit = CODES == INT4 ? 1u << (3 - lane % 4) : lane % 4;
        upper = lane % 4 + 16;
        below = NIBBLES * ((1u << lane % 4) - 1);
        counted = block / 2 * 144 + lane % 2 * 64 + block % 2 * 8 + lane / 16 * 4;
        unit = lane / 4 * 16;
        ranks = ranks_of_warp + unit;
        counts = ranks_of_warp + counted;
        mask = 0x000f000f * gridDim.y, upper_mask = 0x00f000f0 * gridDim.y, sixteen = 16;
        keep(bit);
        keep(below);
        keep(upper);
        keep(counted);
        keep(unit);
        keep(ranks);
        keep(counts);
    }
};

// Where the codes of each row and block begin, an address. They come in the order (half of the
// rows, block, row, column), of which a lane counts four rows; those of 4 bits lie in the upper
// nibbles of the same bytes for the lower half.
__device__ __forceinline__ void make_ranks(u32 chunk, const Lane& lane) {
    u32 words = chunk + lane.counted;
    int count[4], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        count[i] = __popc(load_word(words ^ i * 16));
        sum += count[i];
    }
    u32 before = (CODES == INT4 ? add_before_in_half(sum) : add_before(sum)) - sum;
    u32 at = chunk + CODES_OFFSET + before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        store_word(lane.counts ^ i * 16, at);
        at += count[i];
    }
}

// The codes of eight columns, a byte each, as pairs of halves: two of the first four columns, two of
// the last. UNIT is what these must be multiplied by.
template <class T>
struct Decoded;

#if CODES == INT8
constexpr u32 ZERO = 0x80808080;  // q + 128

template <>
struct Decoded<half_t> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // 1024 + 128 + q
            pair[i] = multiply_add<half_t>(
                permute(codes[i / 2], 0x64646464, i % 2 ? 0x4342 : 0x4140), 0x3c003c00, 0xe480e480);
    }
};

template <>
struct Decoded<bfloat16_t> {
    static constexpr float UNIT = 128;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // (128 + q) * 2^-133, subnormal: times 2^126, less 1
            pair[i] = multiply_add<bfloat16_t>(
                permute(codes[i / 2], 0, i % 2 ? 0x4342 : 0x4140), 0x7e807e80, 0xbf80bf80);
    }
};
#elif CODES == FP8
constexpr u32 ZERO = 0;

template <>
struct Decoded<half_t> {
    u32 pair[4];
#if E4M3
    static constexpr float UNIT = 1;
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane&) {
        halves_of_e4m3(pair[0], pair[1], codes[0]);
        halves_of_e4m3(pair[2], pair[3], codes[1]);
    }
#else
    static constexpr float UNIT = 256;  // the exponent of halves is 8 larger
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 x = permute(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            pair[i] = (x & 0x80008000) | (x >> 1 & 0x3f803f80);
        }
    }
#endif
};

template <>
struct Decoded<bfloat16_t> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 x = permute(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            x = (x & 0x80008000) | (x >> 4 & 0x07f007f0);  // 120 less in the exponent
            pair[i] = multiply_add<bfloat16_t>(x, 0x7b807b80, 0x80008000);
        }
    }
};
#else
// Two's complement, of which the exclusive or with 8 makes q + 8. Pairs are of columns 0, 2; 1, 3.
template <>
struct Decoded<half_t> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane& lane) {
        u32 both = codes[1] * lane.sixteen + codes[0];
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // 1024 + 8 + q, and 1024 + 16 (8 + q)
            u32 x = both >> 8 * i;
            pair[i] = multiply_add<half_t>((x & lane.mask) ^ 0x64086408, 0x3c003c00, 0xe408e408);
            pair[2 + i] =
                multiply_add<half_t>((x & lane.upper_mask) ^ 0x64806480, 0x2c002c00, 0xd480d480);
        }
    }
};

template <>
struct Decoded<bfloat16_t> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const Lane& lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // 128 + 8 + q
            pair[i] = multiply_add<bfloat16_t>((codes[i / 2] >> i % 2 * 8 & lane.mask) ^ 0x43084308,
                                               0x3f803f80, 0xc308c308);
    }
};
#endif

// x of eight columns, as the halves of a lane's pairs lie.
__device__ __forceinline__ void arrange(Vector<u32, 4>& x) {
#if CODES == INT4
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 even = __byte_perm(x.element[i], x.element[i + 1], 0x5410);
        x.element[i + 1] = __byte_perm(x.element[i], x.element[i + 1], 0x7632);
        x.element[i] = even;
    }
#endif
}

// The codes of eight columns, a byte each, from those that lie from byte `at` on: ZERO, or the code
// 0, where a bit is not set.
__device__ __forceinline__ void load_eight(u32 (&codes)[2], u32 word, u32 at, int half,
                                           const Lane& lane) {
    u32 from = at & ~3u, shift = at * 8 + (CODES == INT4 ? half * 4 : 0);
    u32 a = load_constant_word(from), b = load_constant_word(from + 4),
        c = load_constant_word(from + 8);
    u32 low = funnel(a, b, shift), high = funnel(b, c, shift);
#if CODES == INT4
    low &= 0x0f0f0f0f, high &= 0x0f0f0f0f;
    // 8 + rank where the bit is not set: the sign of a byte below 128.
    u32 select = (word * lane.bit & 8 * NIBBLES) * 0x02222221 + 8 * NIBBLES;
    codes[0] = permute(low, high, select);
    codes[1] = permute(low, high, select >> 16);
#else
    // The first four take ZERO where the bit is not set: 4 + rank. The others are masked.
    u32 select = (word >> lane.bit & NIBBLES) * 0x1111110c + 4 * NIBBLES;
    u32 mask = permute(0xff00ff00, 0xff00ff00, word >> lane.upper);
    codes[0] = permute(low, ZERO, select);
    codes[1] = (permute(low, high, select >> 16) & mask) | (ZERO & ~mask);
#endif
}

// sums += those of a group of columns, by its scales of rows g and g + 8.
template <class S>
__device__ __forceinline__ void add_scaled(S& sums, S& group, u32 scales) {
    float upper = __uint_as_float(scales << 16) * Decoded<InputT>::UNIT;
    float lower = __uint_as_float(scales & 0xffff0000) * Decoded<InputT>::UNIT;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[tile][e] += group[tile][e] * (e < 2 ? upper : lower);
            group[tile][e] = 0;
        }
}

// Adds the products of a chunk's 16 rows and 256 columns with x.
template <class X, class S>
__device__ __forceinline__ void add_chunk(S& sums, u32 chunk, const X& x, const Lane& lane) {
    make_ranks(chunk, lane);
    __syncwarp();
    u32 words = chunk + lane.unit;
    S group = {};
#pragma unroll
    for (int block = 0; block < CHUNK_COLUMNS / 32; block += 2) {
        int swap = block / 2 * 16;
        auto word = load_words((words ^ swap) + block * 64);
        auto rank = load_words((lane.ranks ^ swap) + block * 64);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            Fragment left[2];  // of the first and the last four columns
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 w = word.element[odd * 2 + half], codes[2];
                u32 at = rank.element[odd * 2 + half] + __popc(w & lane.below);
                load_eight(codes, w, at, half, lane);
Decoded<InputT> eight(codes, lane);
#pragma unroll
                for (int i = 0; i < 4; ++i) left[i / 2][half + i % 2 * 2] = eight.pair[i];
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const auto& b = x.part[tile][block + odd].element;
                const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
                multiply_fragments<InputT>(group[tile], left[0], first);
                multiply_fragments<InputT>(group[tile], left[1], second);
            }
        }
        if (GROUPS == 2 && block == 2)
            add_scaled(sums, group, load_word(chunk + BITMAP_BYTES + lane.unit / 2));
    }
    add_scaled(sums, group,
               load_word(chunk + BITMAP_BYTES + (GROUPS == 2 ? lane.unit / 2 + 4 : lane.unit / 4)));
}
