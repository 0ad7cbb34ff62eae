// Products with block-sparse matrices on Hopper, for blocks of 128 x 128 of float8 (e4m3), each
// with a scale s, and a dense operand with one for each column, c:
//   out[z, h, l, n] = c[z, h, n] * sum_b s[z, b] * sum_k S[z, b][l, k] * dense[z, h, k, n].
// Floors: the stored blocks, the dense operand and the result once over 4.3 TB/s on an H200;
// 2 * lines * depth operations a stored block and column over 1.77 PFLOP/s, as far as wgmma goes;
// and from L2 to the multiprocessors, 9 TB/s, for a step of 128 along the depth 48 KB, with 256
// columns, or 32 KB, with 128: 1.53 and 1.15 PFLOP/s.
//
// What wgmma of float8 adds up keeps 14 bits. So the products of one block, 128 of the depth, are
// summed by it, and added in fp32 times the block's scale: of 64 columns while it works on the next
// ones. A thread has 128 sums and two times 32 products, 192 of 208 registers. With 128 columns
// and no more than 64 products, added when wgmma was done, 788 TFLOP/s at 4096 and density .5.
//
// Tiles, walk, order, ring and copies are those of hopper/hopper.cuh, for which two numbers that
// are neighbours along the depth are one of two bytes: a block has 64 of them, one stage. Reached
// on an H100 at 4096 in all dimensions and density .1, .25, .5: 388, 716 and 931 TFLOP/s; at 8192
// 769, 1014 and 1095.
//
// Facts, struct Fixed and multiply(...), one wgmma of 64 x 64 by 32: class Scaled of
// kernlib/families/blocksparse/kernels/scaled.py.
#pragma once

#include "blocksparse/hopper/tile.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int QUARTERS = TILE_COLUMNS / 64;  // 2 or 4: those of which products are under way

// Numbers of a stage's products with a quarter's 64 columns of the panel, which wgmma sums up by
// itself.
__device__ __forceinline__ void multiply_quarter(float (&products)[32], const unsigned char* stage,
                                                 int warpgroup, int quarter) {
    u32 at = shared_address(stage);
    u32 panel = at + (WARPGROUPS + quarter) * PIECE_BYTES;
    u64 left = matrix_descriptor(at + warpgroup * PIECE_BYTES, 8 * ROW_BYTES, 8 * ROW_BYTES);
    u64 right = matrix_descriptor(panel, PIECE_BYTES, 8 * ROW_BYTES);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEP_DEPTH / STEP; ++step)
        multiply(products, left + 2 * step, right + 2 * step, step > 0);
    wgmma_commit();
}

__device__ __forceinline__ void add_scaled(float* sums, const float (&products)[32], float scale) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = fmaf(scale, products[i], sums[i]);
}

// Everything of one tile that this warpgroup adds up: a quarter is added while wgmma works on the
// next one, the last of a stage while it works for the other warpgroup.
__device__ __forceinline__ void multiply_tile(float (&sums)[SUMS], const Shared& s,
                                              const float* scales, int warpgroup, Ring& ring) {
    u32 word;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    do {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const u32* words = s.words + ring.stage * WORDS;
        word = words[0];
        if (word & BOTH) {
            float products[2][32], scale = __ldg(scales + words[3]);
            const unsigned char* stage = s.stages + ring.stage * STAGE_BYTES;
            multiply_quarter(products[0], stage, warpgroup, 0);
#pragma unroll
            for (int quarter = 1; quarter < QUARTERS; ++quarter) {
                multiply_quarter(products[quarter % 2], stage, warpgroup, quarter);
                wgmma_wait<1>();
                add_scaled(sums + (quarter - 1) * 32, products[(quarter - 1) % 2], scale);
            }
            wgmma_wait<0>();
            barrier_arrive_by_warp(&s.empty[ring.stage]);
            add_scaled(sums + (QUARTERS - 1) * 32, products[(QUARTERS - 1) % 2], scale);
        } else {
            barrier_arrive_by_warp(&s.empty[ring.stage]);
        }
        ring.next();
    } while (!(word & LAST));
}

// The part of 64 columns times their scales, of which a thread has 16.
__device__ __forceinline__ void scale_columns(float* sums, const Parameters& p, const float* scales,
                                              int first) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            int column = min(first + i / 4 * 8 + lane % 4 * 2 + j, p.columns - 1);
            float scale = __ldg(scales + column * p.column_step);
            sums[i + j] *= scale;
            sums[i + j + 2] *= scale;
        }
    }
}

struct Product : Part {
    using Part::Part;

    __device__ __forceinline__ Tile multiply(float (&sums)[SUMS], const Shared& s, Ring& ring,
                                             int unit, int panel) const {
        Tile tile(p, unit, panel);
        multiply_tile(sums, s, p.slot_scales + tile.batch * p.slot_batch, warpgroup, ring);
        return tile;
    }
    __device__ __forceinline__ void store(float (&sums)[SUMS], const Tile& tile) {
        const float* scales =
            p.column_scales + tile.batch * p.column_batch + tile.head * p.column_head;
        store_parts(sums, tile, [&](float* part, int, int column) {
            scale_columns(part, p, scales, column);
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_scaled(const __grid_constant__ Parameters p) {
    run<Product, Copies>(p);
}
