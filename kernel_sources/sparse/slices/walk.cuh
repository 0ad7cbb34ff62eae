// A warp's walk along a row of a dense matrix in a panel, for the kernels that count and write
// codes of the formats u8, u4 and u2.
#pragma once

#include "common/types.cuh"
#include "sparse/slices/codes.cuh"

using BitsT = Config::BitsT;  // unsigned, as wide as an element

constexpr int THREADS = 256;
constexpr int AHEAD = 8;  // blocks of 32 columns that are read at a time

// Codes before an entry's own for a step.
__device__ __forceinline__ u32 extra_codes(u32 step) {
    return step > LONGEST_STEP ? (step - 1) / LONGEST_STEP : 0;
}

// The codes of a row in a panel, and the column of its last entry.
struct Walked {
    u32 codes, last;
};

// Calls take(code, column, step, bits) for each entry of a row in a panel by the lane that read it,
// with the number of its code.
template <class P, class Take>
__device__ __forceinline__ Walked walk(const P& p, i64 row, u32 panel, const Take& take) {
    u32 lane = threadIdx.x % 32, first = panel * p.width, count = min(p.width, p.cols - first);
    const BitsT* from = p.dense + row * p.row_stride + i64(first) * p.column_stride;
    // Before the next block of columns: codes, and of the last entry the column.
    u32 codes = 0, last = 0u - LEAST_STEP;
    for (u32 begin = 0; begin < count; begin += 32 * AHEAD) {
        BitsT bits[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            u32 column = begin + 32 * k + lane;
            bits[k] = column < count ? from[i64(column) * p.column_stride] : BitsT(0);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            bool entry = BitsT(bits[k] << 1) != 0;  // neither 0.0 nor -0.0
            u32 set = __ballot_sync(~0u, entry), below = set & ((1u << lane) - 1);
            if (set == 0) continue;
            u32 block = begin + 32 * k, before = below ? block + 31 - __clz(below) : last;
            u32 step = block + lane - before, extra = extra_codes(block + __ffs(set) - 1 - last);
            u32 code = codes + extra + __popc(below);
            codes += extra + __popc(set);
            if constexpr (LONGEST_STEP < 31) {  // entries of a block may be as far from each other
                u32 own = entry && below ? extra_codes(step) : 0, to_here = ~0u >> (31 - lane);
#pragma unroll
                for (u32 bit = 1; bit <= 30 / LONGEST_STEP; bit *= 2) {
                    u32 having = __ballot_sync(~0u, own & bit);
                    code += bit * __popc(having & to_here);
                    codes += bit * __popc(having);
                }
            }
            if (entry) take(code, block + lane, step, u32(bits[k]));
            last = block + 31 - __clz(set);
        }
    }
    return {codes, last};
}

struct Ignore {
    __device__ __forceinline__ void operator()(u32, u32, u32, u32) const {}
};
