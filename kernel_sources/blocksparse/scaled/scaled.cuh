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
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT    storage of out, float, and storage of out
//   TILE_COLUMNS             128 or 256
//   LINES_LAST               whether out has the lines contiguous, else its columns
//   SUMMANDS, Finish         no epilogue
//   multiply(...)            one wgmma of 64 x 64 by 32
//   PARAMETER_BYTES          what lowering makes of Parameters
#pragma once

constexpr int WARPGROUPS = 2, LINES = 128, DEPTH = 64;
constexpr int TILE_LINES = 64 * WARPGROUPS, GROUPS = 1;
constexpr bool BY_MAPS = true, SCALED = true, SUMS_ACROSS = false;
constexpr bool TRANSPOSED = false, DEPTH_LAST = true;

#include "blocksparse/hopper/parameters.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int SUMS = TILE_COLUMNS / 2;         // accumulators of a thread
constexpr int ROW_BYTES = 128, ROW = 64;       // of shared memory: swizzled, elements
constexpr int STEP_DEPTH = 64, STEP = 16;      // of a stage, of one wgmma
constexpr int PIECE_BYTES = 64 * ROW_BYTES;    // 64 x 64 elements
constexpr int PANEL_BYTES = STEP_DEPTH * TILE_COLUMNS * 2;
constexpr int STAGE_BYTES = WARPGROUPS * PIECE_BYTES + PANEL_BYTES;
constexpr int STAGES = 192 * 1024 / STAGE_BYTES;  // under way: 4 or 6
constexpr int OUT_PARTS = 2;                   // of a warpgroup's result under way
constexpr int QUARTERS = TILE_COLUMNS / 64;    // 2 or 4: those of which products are under way
constexpr int PARTS = QUARTERS;
constexpr int WORDS = 4;                       // of a stage: live pieces, its tile's place, slot
constexpr u32 BOTH = (1u << WARPGROUPS) - 1;   // a bit a warpgroup
constexpr u32 LAST = 1u << WARPGROUPS;         // beside these: of a tile's last stage

#include "blocksparse/hopper/ring.cuh"
#include "blocksparse/hopper/schedule.cuh"
#include "blocksparse/hopper/store.cuh"
#include "blocksparse/hopper/load.cuh"
#include "blocksparse/hopper/produce.cuh"

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

__device__ __forceinline__ void store_tile(float (&sums)[SUMS], const Parameters& p,
                                           unsigned char* out, int& place, const Tile& tile,
                                           int warpgroup) {
    int line = tile.group * TILE_LINES + warpgroup * 64, first = tile.column * TILE_COLUMNS;
    const float* scales =
        p.column_scales + tile.batch * p.column_batch + tile.head * p.column_head;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        int column = first + part * 64;
        scale_columns(sums + part * 32, p, scales, column);
        store_part([&](int i) { return sums[part * 32 + i]; }, p, out, place, tile, warpgroup,
                   line, column);
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s, int warpgroup) {
    unsigned char* out = s.out + warpgroup * OUT_PARTS * PIECE_BYTES;
    Ring ring;
    int place = 0;
    while (true) {
        barrier_wait(&s.full[ring.stage], ring.parity);
        const u32* words = s.words + ring.stage * WORDS;
        int unit = words[1], panel = words[2];
        if (unit < 0) break;
        float sums[SUMS];
        Tile tile(p, unit, panel);
        multiply_tile(sums, s, p.slot_scales + tile.batch * p.slot_batch, warpgroup, ring);
        store_tile(sums, p, out, place, tile, warpgroup);
    }
    if (threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_scaled(const __grid_constant__ Parameters p) {
    extern __shared__ unsigned char shared[];
    Shared s(shared);
    s.begin(1);
    wait_for_prerequisites();  // order/order.cuh, where it is launched before
    int warpgroup = threadIdx.x / 128;
    if (warpgroup == WARPGROUPS) {
        release_registers<88>();
        if (threadIdx.x / 32 == 4 * WARPGROUPS) produce(p, s);
    } else {
        take_registers<208>();
        consume(p, s, warpgroup);
    }
}
