// The sums of a tile by wgmma: 64 x TILE_N of a warpgroup.
#pragma once

#include "pairwise/split/tile.cuh"

// Warpgroups that issue their products in turns run half a promotion apart, so that one's products
// fill the time in which the other one adds.
__device__ __forceinline__ void begin_turns(int warpgroup) {
    if (ORDERED && warpgroup == WARPGROUPS - 1)
        asm volatile("bar.arrive %0, %1;" :: "n"(1), "n"(256) : "memory");
}

__device__ __forceinline__ void begin_turn(int warpgroup) {
    if (ORDERED) sync_threads(1 + warpgroup, 256);
}

__device__ __forceinline__ void end_turn(int warpgroup) {
    int next = 1 + (warpgroup + 1) % WARPGROUPS;
    if (ORDERED) asm volatile("bar.arrive %0, %1;" :: "r"(next), "n"(256) : "memory");
}

// Where a warpgroup's operands of a stage lie.
struct Places {
    u32 a, b;
};

// Begins the products of one stage; from zero unless `accumulate`. The small ones come first.
__device__ __forceinline__ void multiply_stage(float (&sums)[SUMS], const Places& from,
                                               int accumulate) {
    u64 a = core_matrices_descriptor(from.a, TILE_M * 16, 128);
    u64 b = core_matrices_descriptor(from.b, TILE_N * 16, 128);
    constexpr int A_STEP = 2 * TILE_M, B_STEP = 2 * TILE_N;        // of 16 features, by 16 bytes
    constexpr int A_LOW = A_COPY / 16, B_LOW = B_COPY / 16;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DEPTH / 16; ++step, a += A_STEP, b += B_STEP) {
        if (COPIES == 2) {
            multiply(sums, a + A_LOW, b, accumulate);
            multiply(sums, a, b + B_LOW, 1);
        }
        multiply(sums, a, b, COPIES == 2 ? 1 : accumulate);
        accumulate = 1;
    }
    wgmma_commit();
}

// Of the `index`-th stage of a tile, once it is there: both operands in a stage or, where a's stay
// (s.resident) for all tiles, b alone.
template <class Shared>
__device__ __forceinline__ Places wait_for_stage(const Shared& s, const Ring<STAGES>& stage,
                                                 int warpgroup, int index) {
    barrier_wait(&s.full[stage.place], stage.parity);
    u32 address = shared_address(s.stages + stage.place * STAGE_BYTES);
    u32 a = address, b = address + A_BYTES;
    if constexpr (RESIDENT > 0) {
        a = shared_address(s.resident + index * A_BYTES);
        b = address;
    }
    return {a + warpgroup * (64 * 16), b};
}

// `stages` are a multiple of PROMOTE: where the last ones could be left out, ptxas spilt half the
// sums.
template <class Shared>
__device__ __forceinline__ void multiply_by_parts(float (&total)[SUMS], const Shared& s,
                                                  int warpgroup, int stages, Ring<STAGES>& stage) {
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) total[i] = 0.0f;
#pragma unroll 1
    for (int left = stages; left > 0; left -= PROMOTE) {
        int previous = 0;
        begin_turn(warpgroup);
#pragma unroll
        for (int i = 0; i < PROMOTE; ++i) {
            int index = stages - left + i;
            multiply_stage(sums, wait_for_stage(s, stage, warpgroup, index), i > 0);
            if (i == PROMOTE - 1) end_turn(warpgroup);
            if (i > 0) {
                wgmma_wait<1>();
                barrier_arrive_by_warp(&s.empty[previous]);
            }
            previous = stage.place;
            stage.advance();
        }
        wgmma_wait<0>();
        barrier_arrive_by_warp(&s.empty[previous]);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) total[i] += sums[i];
    }
}

// In turns only where twice as many stages as a tile has are in shared memory.
template <class Shared>
__device__ __forceinline__ void multiply_at_once(float (&sums)[SUMS], const Shared& s,
                                                 int warpgroup, int stages, Ring<STAGES>& stage) {
    int previous = -1;
    begin_turn(warpgroup);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
        multiply_stage(sums, wait_for_stage(s, stage, warpgroup, i), i > 0);
        if (i == stages - 1) end_turn(warpgroup);
        if (i > 0) {
            wgmma_wait<1>();
            barrier_arrive_by_warp(&s.empty[previous]);
        }
        previous = stage.place;
        stage.advance();
    }
    wgmma_wait<0>();
    barrier_arrive_by_warp(&s.empty[previous]);
}

template <class Shared>
__device__ __forceinline__ void multiply_tile(float (&sums)[SUMS], const Shared& s, int warpgroup,
                                              int stages, Ring<STAGES>& stage) {
    if constexpr (PROMOTE > 0) multiply_by_parts(sums, s, warpgroup, stages, stage);
    else multiply_at_once(sums, s, warpgroup, stages, stage);
}
