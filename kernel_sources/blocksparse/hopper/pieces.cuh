// Shared memory as tensor copies and wgmma have it: rows of 128 bytes, whose 16-byte chunks change
// places with the lower bits of the row, in pieces of 64 of them.
#pragma once

#include "common/types.cuh"

constexpr int ROW_BYTES = 128, ROW = 64;     // elements of two bytes
constexpr int PIECE_BYTES = 64 * ROW_BYTES;  // 64 x 64 elements
constexpr int STEP_DEPTH = 64, STEP = 16;    // of a stage, of one wgmma

// Address of 16-byte chunk `chunk` of a row.
__device__ __forceinline__ u32 chunk_address(u32 part, int row, int chunk) {
    return part + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}
