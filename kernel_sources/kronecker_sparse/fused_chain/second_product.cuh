// The second product of a unit: h by the second weight.
#pragma once

#include "kronecker_sparse/fused_chain/first_product.cuh"
#include "kronecker_sparse/fused_chain/unit.cuh"

// Of a warpgroup, in a tile.
__device__ __forceinline__ int first_column(const Consumer& consumer) {
    return WIDE ? 0 : consumer.warpgroup % GROUPS * COLUMNS;
}

__device__ __forceinline__ void second_product(float (&sums)[LANES][COLUMNS / 2],
                                               const Parameters& p, const Shared& s, Ring& ring,
                                               const Consumer& consumer) {
    int stages = ceil_div(p.second_depth, SECOND_DEPTH);
    u32 h = shared_address(s.h) + consumer.first_lane * H_LANE_BYTES +
            consumer.first_row * ROW_BYTES;
    Pending<1> pending;
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
        int k = stage * SECOND_DEPTH;
        barrier_wait(&s.full[ring.stage], ring.parity);
        u32 weight = shared_address(s.stages + ring.stage * STAGE_BYTES) +
                     consumer.first_lane * SECOND_LANE_BYTES + first_column(consumer) * 16;
        u64 left = matrix_descriptor(h + k / ROW * H_CHUNK_BYTES + k % ROW * 2, 8 * ROW_BYTES,
                                     8 * ROW_BYTES);
        u64 right = core_matrices_descriptor(weight, SECOND_COLUMNS * 16, 128);
        int steps = min((p.second_depth - k) / STEP, SECOND_DEPTH / STEP);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < SECOND_DEPTH / STEP; ++step) {
            if (step < steps) {
#pragma unroll
                for (int l = 0; l < LANES; ++l)
                    multiply(sums[l], left + (l * H_LANE_BYTES >> 4) + step * 2,
                             right + (l * SECOND_LANE_BYTES >> 4) + step * 2 * SECOND_COLUMNS,
                             stage + step > 0);
            }
        }
        wgmma_commit();
        pending.replace(s, ring.stage);
        ring.next();
    }
    pending.finish(s);
}
