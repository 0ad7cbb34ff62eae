// The sums of an interleaved tile: fragments of x for LANES wgmmas from each 16-byte load.
#pragma once

#include "common/shared_words.cuh"
#include "kronecker_sparse/interleaved/tile.cuh"

using Chunk = Vector<u32, 4>;

__device__ __forceinline__ Chunk load_chunk(u32 stage, int block, int row, int chunk) {
    return load_shared_words<4>(stage + block * X_BLOCK_BYTES + row * ROW_BYTES +
                             ((chunk ^ (row & SWIZZLE)) << 4));
}

__device__ __forceinline__ u32 low_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 x, u32 y) { return __byte_perm(x, y, 0x7632); }

// Registers `part` (row g) and `part + 1` (row g + 8) of a step's fragments come from both rows.
// Pairs of k for eight l from two chunks of eight l each.
__device__ __forceinline__ void zip(u32 (&a)[LANES][4], int part, const Chunk& x, const Chunk& y) {
#pragma unroll
    for (int i = 0; i < LANES / 2; ++i) {
        a[2 * i][part] = low_halves(x.element[i], y.element[i]);
        a[2 * i + 1][part] = high_halves(x.element[i], y.element[i]);
    }
}

// Words `word` and `word` + 1 of those of a row that a thread of a quad takes of three l.
__device__ __forceinline__ Vector<u32, 2> load_words(u32 stage, int row, int word) {
    return load_shared_words<2>(stage + word / 32 * X_BLOCK_BYTES + row * ROW_BYTES +
                                ((word % 32 / 4 ^ (row & SWIZZLE)) << 4) + word % 4 * 4);
}

__device__ __forceinline__ void load_halves(u32 (&a)[LANES][4], u32 stage, int step, int row,
                                            int t, int half) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        int r = row + 8 * side;
        if constexpr (LANES == 3) {
            u32 word[6];  // (k, l) in their order
#pragma unroll
            for (int i = 0; i < 6; i += 2) {
                auto two = load_words(stage, r, 24 * step + 6 * t + i);
                word[i] = two.element[0], word[i + 1] = two.element[1];
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const u32* of = word + 3 * pair;
                a[0][2 * pair + side] = __byte_perm(of[0], of[1], 0x7610);
                a[1][2 * pair + side] = __byte_perm(of[0], of[2], 0x5432);
                a[2][2 * pair + side] = __byte_perm(of[1], of[2], 0x7610);
            }
        } else if constexpr (LANES == 8) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                int block = HALVES == 2 ? 4 * step + 2 * pair : 2 * step + pair;
                Chunk x = load_chunk(stage, block, r, 2 * t + half);
                Chunk y = load_chunk(stage, HALVES == 2 ? block + 1 : block, r,
                                     HALVES == 2 ? 2 * t + half : 2 * t + 1);
                zip(a, 2 * pair + side, x, y);
            }
        } else if constexpr (LANES == 4) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                Chunk x = load_chunk(stage, step, r, 2 * t + pair);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    a[2 * i][2 * pair + side] = low_halves(x.element[i], x.element[i + 2]);
                    a[2 * i + 1][2 * pair + side] = high_halves(x.element[i], x.element[i + 2]);
                }
            }
        } else {
            Chunk x = load_chunk(stage, step / 2, r, 2 * t + step % 2);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                a[0][2 * pair + side] = low_halves(x.element[2 * pair], x.element[2 * pair + 1]);
                a[1][2 * pair + side] = high_halves(x.element[2 * pair], x.element[2 * pair + 1]);
            }
        }
    }
}

__device__ __forceinline__ void load_floats(u32 (&a)[LANES][4], u32 stage, int step, int row,
                                            int t, int half) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        int r = row + 8 * side;
        if constexpr (LANES == 4) {
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                Chunk x = HALVES == 2 ? load_chunk(stage, 2 * step + pair, r, 2 * t + half)
                                      : load_chunk(stage, step, r, 2 * t + pair);
#pragma unroll
                for (int l = 0; l < 4; ++l) a[l][2 * pair + side] = x.element[l];
            }
        } else {
            Chunk x = load_chunk(stage, step / 2, r, 2 * t + step % 2);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair)
#pragma unroll
                for (int l = 0; l < 2; ++l) a[l][2 * pair + side] = x.element[2 * pair + l];
        }
    }
}

// Packed w of one l: for each 16 bytes along k, TILE_COLUMNS rows.
__device__ __forceinline__ u64 weights_descriptor(u32 address) {
    return core_matrices_descriptor(address, TILE_COLUMNS * 16, 128);
}

__device__ __forceinline__ void multiply_step(float (&sums)[LANES][SUMS], u32 (&a)[LANES][4],
                                              u64 right, bool accumulate) {
    u32 low[LANES][4];
    if constexpr (!HALF_INPUT) {
#pragma unroll
        for (int l = 0; l < LANES; ++l)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float value = __uint_as_float(a[l][i]), high = round_to_tf32(value);
                a[l][i] = __float_as_uint(high);
                low[l][i] = __float_as_uint(round_to_tf32(value - high));
            }
    }
    wgmma_fence();
#pragma unroll
    for (int l = 0; l < LANES; ++l) {
        u64 b = right + (l * W_LANE_BYTES >> 4);
        if constexpr (PRODUCTS == 3) {
            multiply(sums[l], low[l], b, accumulate);
            multiply(sums[l], a[l], b + (SPAN * W_LANE_BYTES >> 4), 1);
            multiply(sums[l], a[l], b, 1);
        } else {
            multiply(sums[l], a[l], b, accumulate);
        }
    }
    wgmma_commit();
}

__device__ __forceinline__ void multiply_tile(float (&total)[LANES][SUMS], const Shared& s,
                                              int warpgroup, int depths, int& stage, int& parity) {
    int lane = threadIdx.x % 32, t = lane % 4;
    int row = (HALVES == 2 ? 0 : warpgroup * 64) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    int half = HALVES == 2 ? warpgroup : 0;
    // In 3xTF32 each stage's sums start from zero and are added outside: the matrix unit truncates.
    float of_stage[LANES][SUMS];
    auto& sums = PRODUCTS == 3 ? of_stage : total;
    if (PRODUCTS == 3) {
#pragma unroll
        for (int l = 0; l < LANES; ++l)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) total[l][i] = 0.0f;
    }
#pragma unroll 1
    for (int d = 0; d < depths; ++d) {
        barrier_wait(&s.full[stage], parity);
        u32 x = shared_address(s.stages + stage * STAGE_BYTES);
        u64 right = weights_descriptor(x + X_BYTES + half * LANES * W_LANE_BYTES);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            u32 a[LANES][4];
            if constexpr (HALF_INPUT) load_halves(a, x, step, row, t, half);
            else load_floats(a, x, step, row, t, half);
            multiply_step(sums, a, right + step * 2 * TILE_COLUMNS,
                          PRODUCTS == 1 ? d + step > 0 : step > 0);
            wgmma_wait<0>();  // its registers must stay as they are until then
        }
        barrier_arrive_by_warp(&s.empty[stage]);
        if (PRODUCTS == 3) {
#pragma unroll
            for (int l = 0; l < LANES; ++l)
#pragma unroll
                for (int i = 0; i < SUMS; ++i) total[l][i] += sums[l][i];
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}
