// The stored blocks of a dense product, on every GPU since sm_80, for any strides:
//   out[z, slot] = Finish(a[z, h, rows of its block, :] b[z, h, :, columns of its block]),
// and zeros in slots that hold none.
//
// Floors on an H200: both operands and the stored blocks once over 4.3 TB/s, of which the blocks
// decide for a depth of 64; 2 * rows * columns * depth operations a stored block over 566 TFLOP/s
// in half types, 282 in TF32, 94 in 3xTF32, what mma.sync reaches. In between stands what goes from
// L2 to the multiprocessors, 9 TB/s: of each depth a block of 128 takes 512 bytes, one of 64 takes
// 192 where its neighbour in the row shares those of a, one of 16 takes 36 of eight in a row:
// 576, 384 and 128 TFLOP/s.
//
// A CTA takes 128 columns of blocks, or rows if these are more, that follow each other in order of
// slots: up to eight blocks, whose rows of a are copied once where they are the same. A warp has
// part of one block, or one. With one part a result's bits depend on neither batch nor layout.
// Where CTAs are few and sums long, several share a sum: each leaves that of its part of the depth
// in a workspace, for parts/parts.cuh to add up.
//
// Facts and struct Fixed: class Sampled of kernlib/families/blocksparse/kernels/sdd/sampled.py.
#pragma once

#include "blocksparse/parts/overlap.cuh"
#include "blocksparse/sampled/load.cuh"

using LeftLoader = Loader<ROWS, ACCESS_A>;
using RightLoader = Loader<COLS, ACCESS_B>;
using LeftReader = Reader<LeftLoader::LINES, ACCESS_A, true>;
using RightReader = Reader<RightLoader::LINES, ACCESS_B, false>;

constexpr int LEFT_BYTES = Stage<LeftLoader::LINES, ACCESS_A>::BYTES;
constexpr int STAGE_BYTES = LEFT_BYTES + Stage<RightLoader::LINES, ACCESS_B>::BYTES;
constexpr int WARPS_DOWN = ROWS / WARP_LINES, WARPS_A_SLOT = WARPS_DOWN * (COLS / WARP_COLUMNS);
static_assert(WARPS_A_SLOT * SLOTS == WARPS, "warps cover a CTA's blocks");

__device__ __forceinline__ int warp_slot() { return threadIdx.x / 32 / WARPS_A_SLOT; }
__device__ __forceinline__ int warp_line() { return threadIdx.x / 32 % WARPS_DOWN * WARP_LINES; }
__device__ __forceinline__ int warp_column() {
    return threadIdx.x / 32 % WARPS_A_SLOT / WARPS_DOWN * WARP_COLUMNS;
}

__device__ __forceinline__ void multiply_stage(Sums& sums, const unsigned char* stage,
                                               const LeftReader& left, const RightReader& right) {
#pragma unroll(SPLIT ? 1 : 2)
    for (int step = 0; step < STEPS; ++step) {
        Right b;
        b.read(right, stage, 0, step);
#pragma unroll
        for (int i = 0; i < FRAGMENTS; ++i) {
            u32 a[4];
            left.read(a, stage, i, step);
            add_products(sums[i], a, b);
        }
    }
}

__device__ __forceinline__ void sum_slots(Sums& total, unsigned char* stages, const Parameters& p,
                                          const Slots& slots, const Part& part, i64 batch) {
    u32 panels = __ballot_sync(ALL, slots.panel == threadIdx.x % 32) & slots.live;
    const InputT* left_data = p.a + batch * p.a_view.batch + part.first * p.a_view.column;
    const InputT* right_data = p.b + batch * p.b_view.batch + part.first * p.b_view.column;
    LeftLoader a(left_data, p.a_view, panels, slots.left);
    RightLoader b(right_data, p.b_view, slots.live, slots.right);
    LeftReader left(slots.panel_of(warp_slot()) * ROWS + warp_line());
    RightReader right(warp_slot() * COLS + warp_column());
    right.place += LEFT_BYTES;
    Sums chain = {};
    Sums& sums = SPLIT ? chain : total;
    int ahead = part.depth, depth = ahead;  // still to be read, and to be multiplied
    int begun = 0;
    unsigned char *read = stages, *write = stages;
    unsigned char* last = stages + (STAGES - 1) * STAGE_BYTES;
    bool is_live = slots.is_live(warp_slot());
#pragma unroll 1
    while (true) {
        bool reads = begun == STAGES - 1;
        if (reads) {
            if (depth <= 0) break;
            wait_for_groups<STAGES - 2>();
            __syncthreads();  // `read` is complete, and nobody reads `write` any more
        } else {
            ++begun;
        }
        if (ahead > 0) {
            a.begin(write, ahead, p.a_view, slots.left, p.a_depth_first);
            b.begin(write + LEFT_BYTES, ahead, p.b_view, slots.right, p.b_depth_first);
            ahead -= STAGE_DEPTH;
        }
        commit_copies();
        write = write == last ? stages : write + STAGE_BYTES;
        if (!reads) continue;
        if (is_live) multiply_stage(sums, read, left, right);
        depth -= STAGE_DEPTH;
        if (SPLIT && (part.depth - depth) % CHAIN == 0) promote(total, sums);
        read = read == last ? stages : read + STAGE_BYTES;
    }
    if (SPLIT) promote(total, sums);
    wait_for_groups<0>();
    __syncthreads();
}

// A warp's part of a slot without a block.
__device__ __forceinline__ void store_zeros(const Target& target) {
    const OutputT zero = convert<OutputT>(0.0f);
#pragma unroll 1
    for (int index = threadIdx.x % 32; index < WARP_LINES * WARP_COLUMNS; index += 32)
        target.out[index / WARP_COLUMNS * target.line_stride +
                   index % WARP_COLUMNS * target.column_stride] = zero;
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::MIN_BLOCKS)
blocksparse_sampled(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Slots slots(p);
    const Part part(p);
    if (PARTIAL) permit_next();
    const i64 slot = slots.first + warp_slot();
#pragma unroll 1
    for (i64 batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
        Sums sums = {};
        if (slots.live) sum_slots(sums, shared, p, slots, part, batch);
        Target target{p.out + part.index * p.part_stride +
                          p.out_view.at(batch, slot, warp_line(), warp_column()),
                      p.out_view.line,
                      p.out_view.column,
                      0,
                      WARP_LINES,
                      WARP_COLUMNS,
                      p.whole_stores != 0};
        if (slots.is_live(warp_slot())) {
            Finish finish(Read<Parameters>{p});
            Beside<SUMMANDS> beside(p, finish, batch, slot, warp_line(), warp_column());
            float* waiting = reinterpret_cast<float*>(shared) + threadIdx.x / 32 * WAITING;
            store_warp(waiting, sums, target, finish, beside);
        } else if (!PARTIAL && slot < p.capacity) {
            store_zeros(target);
        }
        __syncthreads();
    }
}
