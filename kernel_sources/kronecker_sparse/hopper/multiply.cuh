// The sums of a tile by wgmma: 64 rows of the batch a warpgroup, TILE_COLUMNS features.
#pragma once

#include "kronecker_sparse/hopper/tile.cuh"

// Of one copy of a block of w: of rows of 128 bytes, or packed.
__device__ __forceinline__ u64 weights_descriptor(const Shared& s, int stage, int block) {
    u32 address = shared_address(RESIDENT ? s.weights + block * W_BYTES
                                          : s.stages + stage * STAGE_BYTES + X_BYTES);
    return PACKED ? core_matrices_descriptor(address, TILE_COLUMNS * 16, 128)
                  : matrix_descriptor(address, TILE_DEPTH * ROW_BYTES, 8 * ROW_BYTES);
}

// From one wgmma's part of w to the next one's, and from high to low words, in units of 16 bytes.
constexpr int WEIGHTS_STEP = PACKED ? 2 * TILE_COLUMNS : RIGHT_LINES ? STEP * ROW_BYTES / 16 : 2;
constexpr int WEIGHTS_COPY = TILE_COLUMNS * ROW_BYTES / 16;

// Both operands from shared memory; x along k (batch first) or along the batch (batch last).
template <int COUNT>
__device__ __forceinline__ void multiply_halves(float (&sums)[COUNT], const Shared& s,
                                                int warpgroup, int depth, int depth_blocks,
                                                int& stage, int& parity) {
    int previous = -1;
#pragma unroll 1
    for (int block = 0; block < depth_blocks; ++block) {
        barrier_wait(&s.full[stage], parity);
        u32 x = shared_address(s.stages + stage * STAGE_BYTES) + warpgroup * (64 * ROW_BYTES);
        u64 left = matrix_descriptor(x, 8 * ROW_BYTES, 8 * ROW_BYTES);
        u64 right = weights_descriptor(s, stage, block);
        int steps = min((depth - block * TILE_DEPTH + STEP - 1) / STEP, TILE_DEPTH / STEP);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILE_DEPTH / STEP; ++step) {
            if (step < steps) {
                // 16 bytes a unit: 16 rows of k, or 32 bytes along a row.
                constexpr int LEFT_STEP = BATCH_LAST ? STEP * ROW_BYTES / 16 : 2;
                multiply(sums, left + step * LEFT_STEP, right + step * WEIGHTS_STEP,
                         block + step > 0);
            }
        }
        wgmma_commit();
        if (previous >= 0) {
            wgmma_wait<1>();
            barrier_arrive_by_warp(&s.empty[previous]);
        }
        previous = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    barrier_arrive_by_warp(&s.empty[previous]);
}

// x through registers, split into TF32 words there, for TF32 wgmma takes no operand along the
// batch; w was split when it was packed. In 3xTF32 each block's sums start from zero and are added
// outside, because the matrix unit truncates what it accumulates.
// Element (row, k) of the warpgroup's part of a stage. Batch last, wgmma's k = 0..7 are k = 0, 2,
// 4, 6, 1, 3, 5, 7 (w is packed so): 16-byte chunks of four rows then lie in different banks.
__device__ __forceinline__ u32 element_address(u32 stage, int row, int k) {
    if (BATCH_LAST) {
        int chunk = (row % ROW / 4) ^ (k & 7);
        return stage + row / ROW * (TILE_DEPTH * ROW_BYTES) + k * ROW_BYTES + chunk * 16 +
               row % 4 * 4;
    }
    return stage + row * ROW_BYTES + (((k >> 2) ^ (row & 7)) << 4) + (k & 3) * 4;
}

template <int COUNT>
__device__ __forceinline__ void multiply_floats(float (&total)[COUNT], const Shared& s,
                                                int warpgroup, int depth, int depth_blocks,
                                                int& stage, int& parity) {
    constexpr int STEPS = TILE_DEPTH / STEP;
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, k = lane % 4;
    int near = BATCH_LAST ? 2 * k : k, far = BATCH_LAST ? 2 * k + 1 : k + 4;
    float of_block[COUNT];
    auto& sums = PRODUCTS == 3 ? of_block : total;
    if (PRODUCTS == 3) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) total[i] = 0.0f;
    }
#pragma unroll 1
    for (int block = 0; block < depth_blocks; ++block) {
        barrier_wait(&s.full[stage], parity);
        u32 x = shared_address(s.stages + stage * STAGE_BYTES) + warpgroup * (64 * ROW_BYTES);
        u64 right = weights_descriptor(s, stage, block);
        int steps = min((depth - block * TILE_DEPTH + STEP - 1) / STEP, STEPS);
        u32 high[STEPS][4], low[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                float value = load_shared(element_address(x, row + part % 2 * 8,
                                                          step * STEP + (part / 2 ? far : near)));
                float word = round_to_tf32(value);
                high[step][part] = __float_as_uint(word);
                low[step][part] = __float_as_uint(round_to_tf32(value - word));
            }
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step < steps) {
                u64 w = right + step * WEIGHTS_STEP;
                if constexpr (PRODUCTS == 3) {
                    multiply(sums, low[step], w, step > 0);
                    multiply(sums, high[step], w + WEIGHTS_COPY, 1);
                    multiply(sums, high[step], w, 1);
                } else {
                    multiply(sums, high[step], w, block + step > 0);
                }
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        barrier_arrive_by_warp(&s.empty[stage]);
        if (PRODUCTS == 3) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) total[i] += sums[i];
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

template <int COUNT>
__device__ __forceinline__ void multiply_tile(float (&sums)[COUNT], const Shared& s, int warpgroup,
                                              int depth, int depth_blocks, int& stage,
                                              int& parity) {
    if constexpr (HALF_INPUT) {
        multiply_halves(sums, s, warpgroup, depth, depth_blocks, stage, parity);
    } else {
        multiply_floats(sums, s, warpgroup, depth, depth_blocks, stage, parity);
    }
}
