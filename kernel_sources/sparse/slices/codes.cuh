// Codes of the formats u8, u4 and u2, as a slice of 32 rows holds them
// (kernlib/families/sparse/formats/slices.py).
//
// Code k of a lane lies in a group of 8, or, of those behind the last whole one, in one of 4, of 2
// and of 1 as the bits of the length say: of u4 never of 1. A group of COUNT is its values, lane by
// lane, and then its steps, lane by lane: so CODE_BYTES * k bytes lie before the group that begins
// with code k. Of 4-bit steps, those of a group's first half are the low bits of a lane's bytes.
//
// Of u2 groups are of 16, then of 8 and of 4; the values of 8 lie lane by lane, then those of the
// other 8; each quarter's steps have two bits of a lane's bytes, of each step one less.
#pragma once

#include "common/types.cuh"
#include "sparse/slices/instructions.cuh"

constexpr int STEP_BITS = Config::STEP_BITS;  // 8, 4 or 2

template <class T>
constexpr int CODE_BYTES = 32 * sizeof(T) + 4 * STEP_BITS;  // of one code of each lane
constexpr u32 STEP_MASK = (1u << STEP_BITS) - 1;
constexpr u32 LEAST_STEP = STEP_BITS == 2;  // whose bits are all zero
constexpr u32 LONGEST_STEP = STEP_MASK + LEAST_STEP;
constexpr u32 WHOLE_CODES = STEP_BITS == 2 ? 16 : 8;  // of a whole group

// COUNT codes of this lane. Written in order: ptxas would sink the loads to their use.
template <class T, int COUNT>
struct Group {
    static constexpr int VALUE_BYTES = COUNT * sizeof(T);
    static constexpr int STEP_BYTES = COUNT * STEP_BITS / 8;
    u32 values[(VALUE_BYTES + 3) / 4];
    u32 steps[(STEP_BYTES + 3) / 4];

    // From the group's beginning.
    __device__ __forceinline__ void load(const unsigned char* group) {
        u32 lane = threadIdx.x % 32;
        constexpr int PARTS = COUNT > 8 ? COUNT / 8 : 1, PART_BYTES = VALUE_BYTES / PARTS;
#pragma unroll
        for (int i = 0; i < PARTS; ++i)
            load_once<PART_BYTES>(values + i * (PART_BYTES / 4),
                                  group + i * 32 * PART_BYTES + lane * PART_BYTES);
        load_once<STEP_BYTES>(steps, group + 32 * VALUE_BYTES + lane * STEP_BYTES);
    }

    // Steps 4i .. 4i + 3, less LEAST_STEP each, a byte each.
    __device__ __forceinline__ u32 four_steps(int i) const {
        if constexpr (STEP_BITS == 8) return steps[i];
        if constexpr (STEP_BITS == 2) {
            u32 x = steps[0];
            if (COUNT == 8) x = (x >> 4 * i & 0x0303) | (x >> 4 * i & 0x0c0c) << 14;
            else if (COUNT == 4) x |= x << 6 | x << 12 | x << 18;
            else x >>= 2 * i;
            return x & 0x03030303;
        }
        constexpr u32 LOW = 0x0f0f0f0f;
        if constexpr (COUNT == 8) return (i ? steps[0] >> 4 : steps[0]) & LOW;
        return (steps[0] & LOW) | (steps[0] & ~LOW) << (4 * COUNT - 4);
    }
    // The same steps, where all bits are zero.
    __device__ __forceinline__ void set_four_steps(int i, u32 four) {
        if constexpr (STEP_BITS == 8) steps[i] |= four;
        if constexpr (STEP_BITS == 4) steps[0] |= four << 4 * i;
        if constexpr (STEP_BITS == 2) steps[0] |= four << 2 * i;
    }
};

// Element n of words that hold several.
template <class T>
__device__ __forceinline__ float element(const u32* words, int n) {
    if constexpr (sizeof(T) == 4) {
        return __uint_as_float(words[n]);
    } else {
        T x;
        x.bits = u16(n % 2 ? words[n / 2] >> 16 : words[n / 2]);
        return convert<float>(x);
    }
}

// Where code k of a lane lies in a slice of that length: bytes to its value, and to the byte of its
// step, which begins there at bit `shift`.
template <class T>
struct Place {
    u32 value, step, shift;

    __device__ __forceinline__ Place(u32 k, u32 length, u32 lane) {
        constexpr u32 WHOLE = WHOLE_CODES, HALF = WHOLE / 2, QUARTER = WHOLE / 4;
        u32 first = k & ~(WHOLE - 1), count = WHOLE, whole = length & ~(WHOLE - 1);
        if (k >= whole) {  // the rest: a group of HALF, of QUARTER and of 1, as the length says
            u32 half = whole + (length & HALF), quarter = half + (length & QUARTER);
            first = k < half ? whole : k < quarter ? half : quarter;
            count = k < half ? HALF : k < quarter ? QUARTER : 8 / STEP_BITS;
        }
        u32 inside = k - first, bytes = count * STEP_BITS / 8, part = min(count, 8u);
        value = first * CODE_BYTES<T> +
                (inside / 8 * 256 + lane * part + inside % 8) * sizeof(T);
        step = first * CODE_BYTES<T> + 32 * count * sizeof(T) + lane * bytes;
        shift = STEP_BITS == 8 ? 0 : (inside >> (31 - __clz(int(bytes)))) * STEP_BITS;
        step += inside & (bytes - 1);  // which is a power of two
    }
};
