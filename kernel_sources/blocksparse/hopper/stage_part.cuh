// A part of a warpgroup's accumulators to rows of shared memory, as the copy engine writes them.
//
// Reads of struct Config, beside OutputT:
//   SUMS_ACROSS   whether accumulators' rows are columns of the result, else its lines
//   LINES_LAST    whether the result has the lines contiguous, else its columns
#pragma once

#include "blocksparse/hopper/pieces.cuh"
#include "common/hopper.cuh"

// A part of 64 rows and 64 columns of accumulators, of which `sums(i)` is number i. Numbers
// 4c .. 4c + 3 of a thread are columns 8c + 2 (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8
// of its warp's sixteen.
template <class F>
__device__ __forceinline__ void stage_part(const F& sums, u32 to) {
    constexpr bool ROWS_LAST = Config::SUMS_ACROSS != Config::LINES_LAST;  // in memory
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    int matrix = lane / 8, own = lane % 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        u32 part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            part[i] = pack<Config::OutputT>(sums(8 * pair + 2 * i), sums(8 * pair + 2 * i + 1));
        int column = 16 * pair + matrix / 2 * 8, row = 16 * warp + matrix % 2 * 8;
        u32 address = ROWS_LAST ? chunk_address(to, column + own, row / 8)
                                : chunk_address(to, row + own, column / 8);
        store_matrices<ROWS_LAST>(address, part[0], part[1], part[2], part[3]);
    }
}
