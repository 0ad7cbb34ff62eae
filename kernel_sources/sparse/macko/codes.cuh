// MACKO-4 codes: entry k of a row lies `nibble` columns behind the place next to entry k - 1. Eight
// codes are one word, the first in its lowest bits. And rows, found by their first entries.
#pragma once

#include "common/types.cuh"

constexpr u32 ALL_LANES = 0xffffffff;
constexpr u32 NIBBLES = 0x0f0f0f0f;

// Twice the columns of a word's entries behind the place next to the entry before it, in bytes:
// entries 1, 3, 5, 7 and entries 0, 2, 4, 6. At most 2 * (8 * 15 + 7) = 254.
struct Columns {
    u32 odd, even;

    __device__ __forceinline__ explicit Columns(u32 word) {
        u32 first = word << 1 & 2 * NIBBLES, second = word >> 3 & 2 * NIBBLES;
        odd = (first + second) * 0x01010101 + 0x0e0a0602;  // prefix sums
        even = odd - second - 0x02020202;
    }
    // Twice the columns that all eight pass.
    __device__ __forceinline__ u32 width() const { return (odd >> 24) + 2; }
};

// offset + scale * (twice the column of entry k): one instruction.
__device__ __forceinline__ u32 place_of(const Columns& columns, int k, u32 scale, u32 offset) {
    u32 y, word = k % 2 ? columns.odd : columns.even;
    asm("dp4a.u32.u32 %0, %1, %2, %3;"
        : "=r"(y) : "r"(word), "r"(scale << (k / 2 * 8)), "r"(offset));
    return y;
}

// `word` without the nibbles from `count` on; 0 to 8.
__device__ __forceinline__ u32 first_nibbles(u32 word, int count) {
    return count < 8 ? word & ((1u << 4 * count) - 1) : word;
}

// Bytes of sums of a word's nibbles, at most 30 each.
__device__ __forceinline__ u32 pair_sums(u32 word) {
    return (word & NIBBLES) + (word >> 4 & NIBBLES);
}

__device__ __forceinline__ u32 add_bytes(u32 bytes, u32 to) {
    u32 y;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(bytes), "r"(0x01010101), "r"(to));
    return y;
}

// Either 16 bits of a word as a number.
template <class T>
__device__ __forceinline__ float pair_value(u32 word, bool second);
template <>
__device__ __forceinline__ float pair_value<half_t>(u32 word, bool second) {
    return convert<float>(half_t{u16(second ? word >> 16 : word)});
}
template <>
__device__ __forceinline__ float pair_value<bfloat16_t>(u32 word, bool second) {
    return __uint_as_float(second ? word & 0xffff0000 : word << 16);
}
template <>
__device__ __forceinline__ float pair_value<float>(u32 word, bool) {
    return __uint_as_float(word);
}

// Sums of the lanes before this one.
__device__ __forceinline__ u32 scan_lanes(u32 own, u32& total) {
    u32 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        // A shuffle knows by itself whether there is such a lane.
        asm volatile("{\n\t.reg .pred p;\n\t.reg .b32 other;\n\t"
                     "shfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;\n\t"
                     "@p add.u32 %0, %0, other;\n\t}"
                     : "+r"(sum) : "r"(step));
    }
    total = __shfl_sync(ALL_LANES, sum, 31);
    return sum - own;
}

// The last row that begins at `entry` or before, of rows low <= row < high, by all lanes:
// row_ptr[low] <= entry < row_ptr[high].
template <class RowT>
__device__ __forceinline__ int find_row(const RowT* row_ptr, i64 entry, int low, int high) {
    int lane = threadIdx.x % 32;
    while (high - low > 1) {
        int step = (high - low + 31) / 32;
        i64 probe = min(i64(low) + i64(lane + 1) * step, i64(high));
        u32 beyond = __ballot_sync(ALL_LANES, i64(row_ptr[probe]) > entry);
        int place = __ffs(beyond);  // the first one beyond, from 1 on
        high = int(min(i64(low) + i64(place) * step, i64(high)));
        low += (place - 1) * step;
    }
    return low;
}
