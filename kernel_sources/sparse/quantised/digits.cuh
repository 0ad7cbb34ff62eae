// The product of integer codes with a single vector, by tensor cores of integers: sums of a chunk
// are exact, and codes need no conversion.
//
// x becomes integers of DIGITS digits to the base 256, from -128 to 127 each, which are the columns
// of the right operand: of float16 all of x in units of 2^-24, of bfloat16 x in units of 2^-46 of
// the power of two above the largest magnitude of the warp's 256 columns.
#pragma once

#include "sparse/bitmap/config.cuh"
#include "sparse/quantised/fragments.cuh"

constexpr int DIGITS = 6, UNITS = 46;
constexpr u32 BIAS = CODES == INT8 ? 0x80808080 : 0x08080808;  // what is added to each q
constexpr u32 SIGNS = 0x80808080;

// Bits of floats: the power of two, and what stands for infinity and NaN.
constexpr u32 EXPONENT = 0x7f800000;

// Whether numbers have more powers of two than DIGITS hold.
template <class T>
constexpr bool IS_WIDE = false;
template <>
constexpr bool IS_WIDE<bfloat16_t> = true;

// x of a warp's 256 columns: digit n = lane / 4 of the lane's eight columns in each block, what the
// bias adds to the sums, and what one unit of a lane's digits is worth.
struct Digits {
    Vector<u32, 2> part[CHUNK_COLUMNS / 32];
    int biased[GROUPS][2];
    float worth[2];  // two factors, as their product may be no float

    __device__ __forceinline__ void read(const Parameters& p, int chunk, u32 scratch) {
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        int column = chunk * CHUNK_COLUMNS + g * 32 + t * 8;
        float x[8];
        Vector<u32, 4> pairs = {0, 0, 0, 0};
        if (column < p.cols)
            pairs = load_vector<u32, 4>(reinterpret_cast<const u32*>(p.x + column));
#pragma unroll
        for (int e = 0; e < 8; ++e) {  // what lies behind a vector may be anything
            InputT value = {u16(pairs.element[e / 2] >> e % 2 * 16)};
            x[e] = column + e < p.cols ? convert<float>(value) : 0;
        }
        int shift = weigh(x);
        u64 whole[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) whole[e] = digits_of(x[e], shift);
        spread(whole, scratch);
        count_bias();
    }

private:
    // How many bits numbers are shifted by to be whole ones.
    __device__ __forceinline__ int weigh(const float (&x)[8]) {
        u32 most = 0;
#pragma unroll
        for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffff);
        most = __reduce_max_sync(~0u, most);
        int shift = 24;
        if (IS_WIDE<InputT>) shift = UNITS + 126 - int(max(most >> 23, 1u));
        int lower = shift / 2, digit = threadIdx.x % 4 * 16;
        worth[0] = power_of_two(digit - lower);
        worth[1] = power_of_two(lower - shift);
        if (most >= EXPONENT) worth[0] = __uint_as_float(0x7fffffff);  // NaN of all rows
        return shift;
    }

    __device__ static __forceinline__ float power_of_two(int exponent) {
        return __uint_as_float(u32(127 + exponent) << 23);
    }

    // A number shifted, rounded to a whole one: its digits are the bytes, less 128.
    __device__ static __forceinline__ u64 digits_of(float x, int shift) {
        int upper = shift / 2;
        double scaled = double(x) * power_of_two(upper) * power_of_two(shift - upper);
        return u64(__double2ll_rn(scaled)) + 0x808080808080ull;
    }

    // Each lane has all digits of eight columns, and is to have one of eight times as many.
    __device__ __forceinline__ void spread(const u64 (&whole)[8], u32 scratch) {
        int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
        for (int block = 0; block < CHUNK_COLUMNS / 32; ++block) part[block] = {0, 0};
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit += 2) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // two digits of the first four columns, of the last
                u32 bytes = 0;
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    bytes |= (u32(whole[i % 2 * 4 + e] >> 8 * (digit + i / 2)) & 255) << 8 * e;
                store_word(scratch + (i / 2 * 32 + lane) * 8 + i % 2 * 4, bytes ^ SIGNS);
            }
            __syncwarp();
            if (g / 2 * 2 != digit) continue;
#pragma unroll
            for (int block = 0; block < CHUNK_COLUMNS / 32; ++block)
                part[block] = load_two_words(scratch + (g % 2 * 32 + block * 4 + lane % 4) * 8);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void count_bias() {
        const Fragment ones = {BIAS, BIAS, BIAS, BIAS};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            int sums[4] = {};
#pragma unroll
            for (int i = 0; i < 8 / GROUPS; ++i)
                multiply_bytes(sums, ones, part[group * (8 / GROUPS) + i].element);
            biased[group][0] = -sums[0];
            biased[group][1] = -sums[1];
        }
    }
};

// upper, lower += those of a group of columns, by its scales of rows g and g + 8: of two digits
// each lane, which fit 31 bits together. x.worth[1] is still to come.
__device__ __forceinline__ void add_digits(float& upper, float& lower, const int (&group)[4],
                                           u32 scales, const Digits& x) {
    float high = float(group[0] + 256 * group[1]), low = float(group[2] + 256 * group[3]);
    upper += high * x.worth[0] * __uint_as_float(scales << 16);
    lower += low * x.worth[0] * __uint_as_float(scales & 0xffff0000);
}

// Of the four lanes of a row: the sum of `upper` to even ones, that of `lower` to odd ones.
__device__ __forceinline__ float add_lanes(float upper, float lower) {
    bool odd = threadIdx.x & 1;
    float sum = odd ? lower : upper;
    sum += __shfl_xor_sync(~0u, odd ? upper : lower, 1);
    return sum + __shfl_xor_sync(~0u, sum, 2);
}

// Adds the products of a chunk's 16 rows and 256 columns with x.
__device__ __forceinline__ void add_chunk(float (&sums)[1][4], u32 chunk, const Digits& x,
                                          const CodeLane& lane) {
    make_ranks(chunk, lane);
    __syncwarp();
    float upper = 0, lower = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        int counts[4] = {x.biased[group][0], x.biased[group][1],
                         x.biased[group][0], x.biased[group][1]};
#pragma unroll
        for (int i = 0; i < 4 / GROUPS; ++i) {
            int block = (group * (4 / GROUPS) + i) * 2;
            auto word = load_words(chunk + lane.unit[block / 2] + block * 64);
            auto rank = load_words(lane.ranks + lane.unit[block / 2] + block * 64);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                Fragment left;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    u32 w = word.element[odd * 2 + half], codes[2];
                    u32 at = rank.element[odd * 2 + half] + __popc(w & lane.below);
                    load_eight(codes, w, at, half, lane);
                    // Of two's complement in 4 bits the exclusive or with 8 makes q + 8.
                    left[half] = CODES == INT4 ? codes[0] ^ BIAS : codes[0];
                    left[2 + half] = CODES == INT4 ? codes[1] ^ BIAS : codes[1];
                }
                multiply_bytes(counts, left, x.part[block + odd].element);
            }
        }
        u32 scales = GROUPS == 2 ? lane.unit[0] / 2 + group * 4 : lane.unit[0] / 4;
        add_digits(upper, lower, counts, load_word(chunk + BITMAP_BYTES + scales), x);
    }
    sums[0][0] = add_lanes(upper, lower) * x.worth[1];
}
