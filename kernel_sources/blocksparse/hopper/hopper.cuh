// Products with block-sparse matrices on Hopper, for blocks of 64 and 128 and half types:
//   out[z, h, l, n] = Finish(sum_k op(S[z, h])[l, k] * dense[z, h, k, n]).
// Floors: the stored blocks, the dense operand and the result once over 4.3 TB/s on an H200;
// 2 * lines * depth operations a stored block and column over 768 TFLOP/s, what cuBLAS reaches;
// and what goes from L2 to the multiprocessors, 9 TB/s: a step of 64 along the depth takes 8 KB for
// each 64 columns of the dense operand and for each 64 x 64 piece of a block, whatever half of the
// tile it is for: at 4096 in all dimensions 480, 512 and 576 TFLOP/s for blocks of 64 at density
// .1, .25, .5.
// Reached on an H100: 284, 404 and 493 for them by dsd; 347, 538 and 621 for blocks of 128. With
// three stages in the place of four, and all of a result on its way out at once, 4 to 9 % less.
// By clocks of a multiprocessor, a step of two pieces: 1024, 512 and 256 of wgmma for 256, 128 and
// 64 columns, whether these are the result's or not; 1266, 845 and 633 from L2 for as many columns
// that are; 882 from device memory for pieces that are not in L2. So a result of 64 columns takes
// 1024 with tiles of 256, and 633 or 882 with those of 64, which have a quarter of sums to store.
//
// Persistent CTAs of one producer warp and two warpgroups that multiply 64 lines each by
// TILE_COLUMNS columns. A tile is 128 lines: one line of blocks of 128, two of blocks of 64, whose
// union of blocks is walked; a warpgroup whose line does not store a block leaves that step out.
// Tensor copies bring pieces and panels to a ring of stages, swizzled as wgmma reads them, along
// whichever dimension is contiguous. Results go by shared memory and tensor copies too.
//
// Facts, struct Fixed and multiply(...), one wgmma of 64 x TILE_COLUMNS by 16: class Hopper of
// kernlib/families/blocksparse/kernels/spmm/hopper.py.
#pragma once

#include "blocksparse/hopper/tile.cuh"

constexpr int THREADS = 128 * (WARPGROUPS + 1);

// Everything of one tile that this warpgroup adds up. A stage is given back when the products of
// the next one are under way; but before a step that is not this warpgroup's, lest the producer
// wait for it while it waits for the producer.
__device__ __forceinline__ void multiply_tile(float (&sums)[SUMS], const Shared& s, int warpgroup,
                                              Ring& ring) {
    // From one wgmma's part of an operand to the next one's, in units of 16 bytes: 32 bytes along
    // a row of depth, or 16 rows.
    constexpr int LEFT_STEP = TRANSPOSED ? STEP * ROW_BYTES / 16 : 2;
    constexpr int RIGHT_STEP = DEPTH_LAST ? 2 : STEP * ROW_BYTES / 16;
    int pending = -1;
    u32 word;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
    do {
        barrier_wait(&s.full[ring.stage], ring.parity);
        word = s.words[ring.stage * WORDS];
        if (word >> warpgroup & 1) {
            u32 at = shared_address(s.stages + ring.stage * STAGE_BYTES);
            u64 left = matrix_descriptor(at + warpgroup * PIECE_BYTES, 8 * ROW_BYTES,
                                         8 * ROW_BYTES);
            u64 right = matrix_descriptor(at + WARPGROUPS * PIECE_BYTES, PIECE_BYTES,
                                          8 * ROW_BYTES);
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < STEP_DEPTH / STEP; ++step)
                multiply(sums, left + step * LEFT_STEP, right + step * RIGHT_STEP, 1);
            wgmma_commit();
            if (pending >= 0) {
                wgmma_wait<1>();
                barrier_arrive_by_warp(&s.empty[pending]);
            }
            pending = ring.stage;
        } else {
            if (pending >= 0) {
                wgmma_wait<0>();
                barrier_arrive_by_warp(&s.empty[pending]);
                pending = -1;
            }
            barrier_arrive_by_warp(&s.empty[ring.stage]);
        }
        ring.next();
    } while (!(word & LAST));
    wgmma_wait<0>();
    if (pending >= 0) barrier_arrive_by_warp(&s.empty[pending]);
}

struct Product : Part {
    Finish finish;

    __device__ __forceinline__ Product(const Parameters& p, const Shared& s, int warpgroup)
        : Part(p, s, warpgroup), finish(Read<Parameters>{p}) {}

    __device__ __forceinline__ Tile multiply(float (&sums)[SUMS], const Shared& s, Ring& ring,
                                             int unit, int panel) const {
        multiply_tile(sums, s, warpgroup, ring);
        return Tile(p, unit, panel);
    }
    __device__ __forceinline__ void store(float (&sums)[SUMS], const Tile& tile) {
        const Finisher finisher(p, finish, tile);
        store_parts(sums, tile, [&](float* part, int line, int column) {
            if (!Config::EPILOGUE) return;
#pragma unroll
            for (int i = 0; i < 32; ++i) part[i] = finisher(part[i], i, line, column);
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
blocksparse_hopper(const __grid_constant__ Parameters p) {
    run<Product, Copies>(p);
}
