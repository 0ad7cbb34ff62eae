// A warp's walk along a row of a dense matrix, 256 columns at a time, eight a lane, for the kernels
// that count and write entries in MACKO's 4-bit delta format.
//
// A value at column c, the one before it at p (-1 at a row's start), makes (c - p - 1) / 16 pads at
// columns p + 16, p + 32 and so on, and an entry with code (c - p - 1) % 16. Only the first value
// of a lane's eight may have pads, and its p is the last value of some lane below, or of a step
// before.
#pragma once

#include "common/types.cuh"

using BitsT = Config::BitsT;                       // a value's bits
constexpr BitsT MAGNITUDE = Config::MAGNITUDE;     // those behind the sign

constexpr int THREADS = 128;
constexpr int RUN = 8;
constexpr int LAST_CODE = 15;
constexpr u32 ALL_LANES = 0xffffffff;

__device__ __forceinline__ bool is_value(BitsT bits) { return (bits & MAGNITUDE) != 0; }

// A lane's columns of a step, zeros behind the last one.
template <class P>
__device__ __forceinline__ void read_run(BitsT (&run)[RUN], const P& p, const BitsT* row,
                                         i64 column) {
    constexpr int CHUNK = 16 / sizeof(BitsT);
    if (p.vectors && column + RUN <= p.columns) {
#pragma unroll
        for (int i = 0; i < RUN; i += CHUNK) {
            auto read = load_vector<BitsT, CHUNK>(row + column + i);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) run[i + e] = read.element[e];
        }
    } else {
#pragma unroll
        for (int i = 0; i < RUN; ++i) run[i] = column + i < p.columns ? row[column + i] : BitsT(0);
    }
}

// Calls take(run, mask, count, column, before) for a lane's columns from `column` on: which of them
// are values, how many entries these make, and the column of the value before them.
template <class P, class Take>
__device__ __forceinline__ void walk(const P& p, const BitsT* row, const Take& take) {
    int lane = threadIdx.x % 32;
    i64 last = -1;  // column of the last value so far
    for (i64 first = 0; first < p.columns; first += 32 * RUN) {
        i64 column = first + lane * RUN;
        BitsT run[RUN];
        read_run(run, p, row, column);
        u32 mask = 0;
#pragma unroll
        for (int i = 0; i < RUN; ++i) mask |= u32(is_value(run[i])) << i;
        u32 lanes = __ballot_sync(ALL_LANES, mask != 0);
        if (lanes == 0) continue;
        u32 below = lanes & ((1u << lane) - 1);
        int own = lane * RUN + 31 - __clz(mask);  // its last value
        int other = __shfl_sync(ALL_LANES, own, below ? 31 - __clz(below) : 0);
        int end = __shfl_sync(ALL_LANES, own, 31 - __clz(lanes));
        i64 before = below ? first + other : last;
        last = first + end;
        int count = 0;
        if (mask) count = __popc(mask) + int((column + __ffs(mask) - 2 - before) / (LAST_CODE + 1));
        take(run, mask, count, column, before);
    }
}
