// The first product of a unit: x by the first weight into shared memory. Parameters, shared memory
// and units are those of fused_chain/fused_chain.cuh or of hidden.cuh.
#pragma once

#include "kronecker_sparse/fused_chain/tiles.cuh"

template <class Parameters, class Shared, class Unit>
__device__ __forceinline__ void load_first(const Parameters& p, const Shared& s, Ring& ring,
                                           const Unit& unit, int block, int chunk) {
    int row = unit.row;
    if (FIRST_STAGES == 2) {
        barrier_wait(&s.empty[ring.stage], ring.parity);
        unsigned char* to = s.stages + ring.stage * STAGE_BYTES;
        u64* full = &s.full[ring.stage];
        barrier_expect(full, 2 * BOX_BYTES);
        load_box(to, p.x, full, chunk * ROW, block, row, 0);
        load_box(to + BOX_BYTES, p.x, full, chunk * ROW, block, row + BOX_ROWS, 0);
        row += 2 * BOX_ROWS;
        ring.next();
    }
    barrier_wait(&s.empty[ring.stage], ring.parity);
    unsigned char* to = s.stages + ring.stage * STAGE_BYTES;
    u64* full = &s.full[ring.stage];
    barrier_expect(full, FIRST_BYTES);
    load_box(to, p.x, full, chunk * ROW, block, row, 0);
    load_box(to + BOX_BYTES, p.first, full, chunk * ROW, 0, unit.lane, block);
    ring.next();
}

// What a thread of a warpgroup that multiplies is.
struct Consumer {
    int warpgroup, pair;
    int first_row;                       // of the pair's 64, in a tile
    int pair_lane, first_lane;           // first l of the pair and of the warpgroup, in a unit
    int row, two;                        // accumulators: rows `row` and `row` + 8; 2 columns of 8
    __device__ __forceinline__ Consumer() {
        warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // in a uniform register
        pair = warpgroup / GROUPS;
        first_row = WIDE ? 0 : pair * 64;
        pair_lane = WIDE ? pair * GROUPS * LANES : 0;
        first_lane = WIDE ? warpgroup * LANES : 0;
        row = first_row + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        two = threadIdx.x % 4 * 2;
    }
    __device__ __forceinline__ int first_share() const {
        return FIRST_COLUMNS > FIRST_SHARE ? warpgroup % 2 * FIRST_SHARE : 0;
    }
    __device__ __forceinline__ void synchronize_pair() const {
        sync_threads(1 + pair, 128 * GROUPS);
    }
    __device__ __forceinline__ void synchronize() const { sync_threads(4 + warpgroup, 128); }
};

// Groups of wgmma under way: one at most, whose COUNT stages are released behind the next one.
template <int COUNT>
struct Pending {
    int stage = -1;
    // Behind a commit of what reads the stages from `next` on.
    template <class Shared>
    __device__ __forceinline__ void replace(const Shared& s, int next) {
        if (stage >= 0) {
            wgmma_wait<1>();
            release(s);
        }
        stage = next;
    }
    template <class Shared>
    __device__ __forceinline__ void finish(const Shared& s) {
        wgmma_wait<0>();
        if (stage >= 0) release(s);
        stage = -1;
    }
    template <class Shared>
    __device__ __forceinline__ void release(const Shared& s) {
        barrier_arrive_by_warp(&s.empty[stage]);
        if (COUNT == 2) barrier_arrive_by_warp(&s.empty[stage + 1 == STAGES ? 0 : stage + 1]);
    }
};

// The warpgroups of a pair take blocks by turns or, if BOTH, halves of each block's columns.
constexpr bool BOTH = FIRST_COLUMNS > FIRST_SHARE;
constexpr int FIRST_SUMS = FIRST_SHARE / 2;
// Blocks whose products a warpgroup has under way at once: four, or as many as there are registers
// for. Beside them the stages of a group of wgmma are waited for while those of the one before are
// held.
constexpr int MOST_TOGETHER = (WARPGROUPS == 2 ? 64 : 16) / FIRST_SUMS;
constexpr int TOGETHER = MOST_TOGETHER > 4 ? 4 : MOST_TOGETHER > 0 ? MOST_TOGETHER : 1;
static_assert(STAGES >= 2 * FIRST_STAGES, "else producer and consumers wait for each other");

// Begins the product of a block.
template <class Parameters, class Shared>
__device__ __forceinline__ void multiply_block(float (&sums)[FIRST_SUMS], const Parameters& p,
                                               const Shared& s, Ring& ring,
                                               Pending<FIRST_STAGES>& pending,
                                               const Consumer& consumer) {
    int chunks = ceil_div(p.depth, ROW);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        int stage = ring.stage;
        u32 first = shared_address(s.stages + stage * STAGE_BYTES);
        u32 x = first + consumer.first_row * ROW_BYTES;
        barrier_wait(&s.full[stage], ring.parity);
        if (FIRST_STAGES == 2) {
            ring.next();
            first = shared_address(s.stages + ring.stage * STAGE_BYTES);
            if (consumer.pair == 2) x = first;
            barrier_wait(&s.full[ring.stage], ring.parity);
        }
        u32 weight = first + BOX_BYTES + (WIDE ? consumer.pair * FIRST_COLUMNS * ROW_BYTES : 0) +
                     consumer.first_share() * ROW_BYTES;
        u64 left = matrix_descriptor(x, 8 * ROW_BYTES, 8 * ROW_BYTES);
        u64 right = matrix_descriptor(weight, 8 * ROW_BYTES, 8 * ROW_BYTES);
        int steps = min(ceil_div(p.depth - chunk * ROW, STEP), ROW / STEP);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < ROW / STEP; ++step)
            if (step < steps) multiply(sums, left + step * 2, right + step * 2, chunk + step > 0);
        wgmma_commit();
        pending.replace(s, stage);
        ring.next();
    }
}

// From the first byte of an l of h to that of (row; k).
__device__ __forceinline__ int h_offset(int row, int k) {
    return k / ROW * H_CHUNK_BYTES + row * ROW_BYTES + (k % ROW * 2 ^ (row & 7) << 4);
}

// The sums of blocks, rounded, to their places in h, each of these functions for an ORDER. Eight
// columns have the same l and neighbouring k.
template <int QUOTIENT, class Shared>
__device__ __forceinline__ void store_eights(const float (&sums)[TOGETHER][FIRST_SUMS],
                                             const Shared& s, int block, int blocks,
                                             const Consumer& consumer) {
    int matrix = threadIdx.x % 32 / 8, row = consumer.row / 16 * 16 + threadIdx.x % 8;
    row += matrix % 2 * 8;
    u32 h = shared_address(s.h);
#pragma unroll
    for (int other = 0; other < TOGETHER; ++other) {
        if (block + other >= blocks) break;
#pragma unroll
        for (int i = 0; i < FIRST_SUMS; i += 8) {
            u32 part[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // of a last half its rows twice
                int place = i + 2 * (i + 8 > FIRST_SUMS ? j % 2 : j);
                part[j] = pack<InputT>(sums[other][place], sums[other][place + 1]);
            }
            int column =
                consumer.first_share() + i * 2 + (i + 8 > FIRST_SUMS ? 0 : matrix / 2 * 8);
            int lane = consumer.pair_lane + column / QUOTIENT;
            int k = (block + other) * QUOTIENT + column % QUOTIENT;
            store_matrices<false>(h + lane * H_LANE_BYTES + h_offset(row, k), part[0], part[1],
                                  part[2], part[3]);
        }
    }
}

// Eight columns have 8 / QUOTIENT l. Where a block has but one or two k of an l, those of four
// blocks are stored together: their number is a multiple of four, as k are whole steps of wgmma.
template <int QUOTIENT, class Shared>
__device__ __forceinline__ void store_fewer(const float (&sums)[TOGETHER][FIRST_SUMS],
                                            const Shared& s, int block, int blocks,
                                            const Consumer& consumer) {
    static_assert(QUOTIENT > 1 || TOGETHER == 4, "of one k each, four blocks are stored together");
    constexpr int STEP_BYTES = 8 / QUOTIENT * H_LANE_BYTES, LINE_BYTES = 8 * ROW_BYTES;
    int column = consumer.first_share() + consumer.two;
    unsigned char* to = s.h + (consumer.pair_lane + column / QUOTIENT) * H_LANE_BYTES;
    if constexpr (QUOTIENT <= 2 && TOGETHER == 4) {
        to += h_offset(consumer.row, block * QUOTIENT);
#pragma unroll
        for (int i = 0; i < FIRST_SUMS; i += 2) {
            unsigned char* place = to + i / 4 * STEP_BYTES + i / 2 % 2 * LINE_BYTES;
            if constexpr (QUOTIENT == 1) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    Vector<u32, 2> values = {pack<InputT>(sums[0][i + e], sums[1][i + e]),
                                             pack<InputT>(sums[2][i + e], sums[3][i + e])};
                    store_vector(reinterpret_cast<u32*>(place + e * H_LANE_BYTES), values);
                }
            } else {
                Vector<u32, 4> values = {pack<InputT>(sums[0][i], sums[0][i + 1]),
                                         pack<InputT>(sums[1][i], sums[1][i + 1]),
                                         pack<InputT>(sums[2][i], sums[2][i + 1]),
                                         pack<InputT>(sums[3][i], sums[3][i + 1])};
                store_vector(reinterpret_cast<u32*>(place), values);
            }
        }
    } else {
#pragma unroll
        for (int other = 0; other < TOGETHER; ++other) {
            if (block + other >= blocks) break;
            unsigned char* first =
                to + h_offset(consumer.row, (block + other) * QUOTIENT + column % QUOTIENT);
#pragma unroll
            for (int i = 0; i < FIRST_SUMS; i += 2) {
                unsigned char* place = first + i / 4 * STEP_BYTES + i / 2 % 2 * LINE_BYTES;
                *reinterpret_cast<u32*>(place) = pack<InputT>(sums[other][i], sums[other][i + 1]);
            }
        }
    }
}

// A block's columns in their order, of which the first may have any l.
template <class Shared>
__device__ __forceinline__ void store_in_order(const float (&sums)[TOGETHER][FIRST_SUMS],
                                               const Shared& s, int block, int blocks,
                                               const Consumer& consumer) {
#pragma unroll
    for (int other = 0; other < TOGETHER; ++other) {
        if (block + other >= blocks) break;
        int first = (block + other) * FIRST_COLUMNS + consumer.first_share() + consumer.two;
        unsigned char* line[SPAN];  // of the l of a column that is `l` behind the first, and its k
        int depth[SPAN];
#pragma unroll
        for (int l = 0; l < SPAN; ++l) {
            line[l] = s.h + (first + l) % SPAN * H_LANE_BYTES;
            depth[l] = (first + l) / SPAN;
        }
#pragma unroll
        for (int i = 0; i < FIRST_SUMS; i += 2) {
            int row = consumer.row + i / 2 % 2 * 8;
            u32 both = pack<InputT>(sums[other][i], sums[other][i + 1]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int behind = i / 4 * 8 + e;
                int k = depth[behind % SPAN] + behind / SPAN;
                *reinterpret_cast<u16*>(line[behind % SPAN] + h_offset(row, k)) =
                    u16(both >> 16 * e);
            }
        }
    }
}

// Blocks that the other warpgroup of a pair multiplies.
template <class Parameters, class Shared>
__device__ __forceinline__ void skip_blocks(const Parameters& p, const Shared& s, Ring& ring,
                                            int blocks) {
    int stages = ceil_div(p.depth, ROW) * blocks * FIRST_STAGES;
    for (int stage = 0; stage < stages; ++stage) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        barrier_arrive_by_warp(&s.empty[ring.stage]);
        ring.next();
    }
}

template <class Parameters, class Shared>
__device__ __forceinline__ void first_product(const Parameters& p, const Shared& s, Ring& ring,
                                              const Consumer& consumer) {
    int turn = consumer.warpgroup % GROUPS;
#pragma unroll 1
    for (int block = 0; block < p.blocks; block += TOGETHER, turn ^= GROUPS - 1) {
        if (turn && !BOTH) {
            skip_blocks(p, s, ring, min(TOGETHER, p.blocks - block));
            continue;
        }
        float sums[TOGETHER][FIRST_SUMS];
        Pending<FIRST_STAGES> pending;
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
            if (block + i < p.blocks) multiply_block(sums[i], p, s, ring, pending, consumer);
        pending.finish(s);
        if constexpr (ORDER == 2) store_eights<QUOTIENT>(sums, s, block, p.blocks, consumer);
        else if constexpr (ORDER == 1) store_fewer<QUOTIENT>(sums, s, block, p.blocks, consumer);
        else store_in_order(sums, s, block, p.blocks, consumer);
    }
}
