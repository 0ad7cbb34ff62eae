// Products of codes as halves, by tensor cores that sum in float32: of e4m3, and of several
// vectors.
#pragma once

#include "sparse/quantised/fragments.cuh"

// The codes of eight columns, a byte each, as pairs of halves, two of the first four columns and
// two of the last. UNIT is what these must be multiplied by.
template <class T, Codes>
struct Decoded;

template <>
struct Decoded<half_t, INT8> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const CodeLane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // 1024 + 128 + q
            pair[i] = multiply_add<half_t>(
                permute(codes[i / 2], 0x64646464, i % 2 ? 0x4342 : 0x4140), 0x3c003c00, 0xe480e480);
    }
};

template <>
struct Decoded<bfloat16_t, INT8> {
    static constexpr float UNIT = 128;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const CodeLane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // (128 + q) * 2^-133, subnormal: times 2^126, less 1
            pair[i] = multiply_add<bfloat16_t>(
                permute(codes[i / 2], 0, i % 2 ? 0x4342 : 0x4140), 0x7e807e80, 0xbf80bf80);
    }
};

template <>
struct Decoded<half_t, FP8> {
    // Without an instruction that makes halves of e4m3: their exponent is 8 larger.
    static constexpr float UNIT = Config::E4M3 ? 1 : 256;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const CodeLane&) {
        if constexpr (Config::E4M3) {
            halves_of_e4m3(pair[0], pair[1], codes[0]);
            halves_of_e4m3(pair[2], pair[3], codes[1]);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 x = permute(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            pair[i] = (x & 0x80008000) | (x >> 1 & 0x3f803f80);
        }
    }
};

template <>
struct Decoded<bfloat16_t, FP8> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const CodeLane&) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 x = permute(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
            x = (x & 0x80008000) | (x >> 4 & 0x07f007f0);  // 120 less in the exponent
            pair[i] = multiply_add<bfloat16_t>(x, 0x7b807b80, 0x80008000);
        }
    }
};

// Two's complement, of which the exclusive or with 8 makes q + 8. Pairs are of columns 0, 2; 1, 3.
template <>
struct Decoded<half_t, INT4> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const CodeLane& lane) {
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
struct Decoded<bfloat16_t, INT4> {
    static constexpr float UNIT = 1;
    u32 pair[4];
    __device__ __forceinline__ Decoded(const u32 (&codes)[2], const CodeLane& lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // 128 + 8 + q
            pair[i] = multiply_add<bfloat16_t>((codes[i / 2] >> i % 2 * 8 & lane.mask) ^ 0x43084308,
                                               0x3f803f80, 0xc308c308);
    }
};

// x of eight columns, as the halves of a lane's pairs of INT4 lie.
__device__ __forceinline__ void arrange(Vector<u32, 4>& x) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 even = __byte_perm(x.element[i], x.element[i + 1], 0x5410);
        x.element[i + 1] = __byte_perm(x.element[i], x.element[i + 1], 0x7632);
        x.element[i] = even;
    }
}

// sums += those of a group of columns, by its scales of rows g and g + 8.
template <Codes OF, int TILES>
__device__ __forceinline__ void add_scaled(float (&sums)[TILES][4], float (&group)[TILES][4],
                                           u32 scales) {
    float upper = __uint_as_float(scales << 16) * Decoded<InputT, OF>::UNIT;
    float lower = __uint_as_float(scales & 0xffff0000) * Decoded<InputT, OF>::UNIT;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sums[tile][e] += group[tile][e] * (e < 2 ? upper : lower);
            group[tile][e] = 0;
        }
}

// Adds the products of a chunk's 16 rows and 256 columns with x.
template <class X, int TILES, Codes OF = CODES>
__device__ __forceinline__ void add_chunk(float (&sums)[TILES][4], u32 chunk, const X& x,
                                          const CodeLane& lane) {
    make_ranks(chunk, lane);
    __syncwarp();
    float group[TILES][4] = {};
#pragma unroll
    for (int block = 0; block < CHUNK_COLUMNS / 32; block += 2) {
        auto word = load_words(chunk + lane.unit[block / 2] + block * 64);
        auto rank = load_words(lane.ranks + lane.unit[block / 2] + block * 64);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            Fragment left[2];  // of the first and the last four columns
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 w = word.element[odd * 2 + half], codes[2];
                u32 at = rank.element[odd * 2 + half] + __popc(w & lane.below);
                load_eight(codes, w, at, half, lane);
                Decoded<InputT, OF> eight(codes, lane);
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
            add_scaled<OF>(sums, group, load_word(chunk + BITMAP_BYTES + lane.unit[0] / 2));
    }
    u32 scales = GROUPS == 2 ? lane.unit[0] / 2 + 4 : lane.unit[0] / 4;
    add_scaled<OF>(sums, group, load_word(chunk + BITMAP_BYTES + scales));
}
