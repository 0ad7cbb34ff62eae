// The sums of one tile: eight warps of WARP_ROWS x WARP_COLUMNS each, STAGES stages under way.
//
// The tensor core truncates what it accumulates. With SPLIT (3xTF32) that would count, so its sums
// start anew every 8 terms and are added up outside: in an emulation of the hardware sums of 192
// terms are off by 1.3e-7 so, by 1.6e-7 with 16, 2.5e-7 with 32 and 4.6e-7 with 64.
#pragma once

#include "common/copy_groups.cuh"
#include "kronecker_sparse/portable/operand.cuh"

constexpr int WARPS_DOWN = TILE_ROWS > TILE_COLUMNS ? 4 : 2;
constexpr int WARP_ROWS = TILE_ROWS / WARPS_DOWN;
constexpr int WARP_COLUMNS = TILE_COLUMNS / (THREADS / 32 / WARPS_DOWN);
constexpr int GROUPS = WARP_ROWS / 16, PAIRS = WARP_COLUMNS / 16;  // fragments of left, of right
constexpr int STEPS = 2;                                           // of 32 bytes, in a stage
constexpr int LEFT_BYTES = stage_bytes<TILE_ROWS, ACCESS_LEFT>;
constexpr int STAGE_BYTES = LEFT_BYTES + stage_bytes<TILE_COLUMNS, ACCESS_RIGHT>;
constexpr bool SPLIT = PRODUCTS == 3;
// Two would not fit in 128 registers beside two sums for each output, or what a gather holds of a
// large tile.
constexpr bool GATHERS = ACCESS_LEFT == Access::gather || ACCESS_RIGHT == Access::gather;
constexpr int STEPS_AT_ONCE = SPLIT || (GATHERS && TILE_COLUMNS == 128) ? 1 : STEPS;

using Sums = float[GROUPS][2 * PAIRS][4];
using LeftReader = Reader<TILE_ROWS, ACCESS_LEFT, true>;
using RightReader = Reader<TILE_COLUMNS, ACCESS_RIGHT, false>;

__device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % WARPS_DOWN * WARP_ROWS; }
__device__ __forceinline__ int warp_column() {
    return threadIdx.x / 32 / WARPS_DOWN * WARP_COLUMNS;
}

// An element as the tensor core takes it.
__device__ __forceinline__ void prepare(u32 x, u32& word, u32& low) {
    if (SPLIT) split_to_tf32(x, word, low);
    else word = sizeof(InputT) == 4 ? round_to_tf32(x) : x;
}

// Adds the products of 32 bytes of depth.
__device__ __forceinline__ void multiply_step(Sums& total, const unsigned char* stage,
                                              const LeftReader& left, const RightReader& right,
                                              int step) {
    u32 b[2 * PAIRS][2], low_b[2 * PAIRS][2];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        u32 x[4];
        right.read(x, stage + LEFT_BYTES, pair, step);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            prepare(x[i], b[2 * pair + i / 2][i % 2], low_b[2 * pair + i / 2][i % 2]);
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        u32 x[4], a[4], low_a[4];
        left.read(x, stage, group, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) prepare(x[i], a[i], low_a[i]);
        if constexpr (SPLIT) {  // the small products first, while the sums are small
            float sums[2 * PAIRS][4] = {};
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(sums[j], low_a, b[j]);
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(sums[j], a, low_b[j]);
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) multiply_fragments<InputT>(sums[j], a, b[j]);
#pragma unroll
            for (int i = 0; i < 8 * PAIRS; ++i) total[group][i / 4][i % 4] += sums[i / 4][i % 4];
        } else {
#pragma unroll
            for (int j = 0; j < 2 * PAIRS; ++j) {
                multiply_fragments<InputT>(total[group][j], a, b[j]);
            }
        }
    }
}

// Sums over `depth` terms of both operands. Afterwards nobody reads the stages any more.
__device__ __forceinline__ void sum_tile(Sums& total, unsigned char* stages, const Lines& a,
                                         const Lines& b, int depth) {
    Loader<TILE_ROWS, ACCESS_LEFT> left(a);
    Loader<TILE_COLUMNS, ACCESS_RIGHT> right(b);
    LeftReader left_reader(warp_row());
    RightReader right_reader(warp_column());
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; ++s) {
        unsigned char* stage = stages + s * STAGE_BYTES;
        int ahead = depth - s * DEPTH;
        if (ahead > 0) {
            left.begin(stage, ahead);
            right.begin(stage + LEFT_BYTES, ahead);
            left.end(stage);
            right.end(stage + LEFT_BYTES);
        }
        commit_copies();
    }
    unsigned char *read = stages, *write = stages + (STAGES - 1) * STAGE_BYTES;
    unsigned char* last = write;
#pragma unroll 1
    for (int done = 0; done < depth; done += DEPTH) {
        wait_for_groups<STAGES - 2>();
        __syncthreads();  // `read` is complete, and nobody reads `write` any more
        int ahead = depth - done - (STAGES - 1) * DEPTH;
        if (ahead > 0) {
            left.begin(write, ahead);
            right.begin(write + LEFT_BYTES, ahead);
        }
        commit_copies();
#pragma unroll STEPS_AT_ONCE
        for (int step = 0; step < STEPS; ++step) {
            multiply_step(total, read, left_reader, right_reader, step);
        }
        if (ahead > 0) {
            left.end(write);
            right.end(write + LEFT_BYTES);
        }
        write = read;
        read = read == last ? stages : read + STAGE_BYTES;
    }
    __syncthreads();
}
