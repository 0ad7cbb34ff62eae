// Gradients of weights with d > 1 on Hopper, half types, batch first, which read one operand as it
// lies:
//   partial[split; i,l,j,k] = sum_n left[n; i,j,l] * right[n; i,l,k]
// over the n of a split. The l of left lie side by side; right has each l by itself
// (deinterleave.cuh).
// Floors: batch * a*d*(b+c) * itemsize bytes over 4.3 TB/s on an H200, and as often as there are
// tiles of j, right from L2; 2*a*b*c*d*batch operations over 770 TFLOP/s. On an H200 25216 rows of
// (1,768,192,2) in bfloat16 take 40 us, where floors are 22 and 19; both operands transposed, and
// their sums, took 61. Of (1,128,128,3) it is 21 (9 and 6; 24). The sums leave no registers to read
// ahead: a warpgroup reads its fragments while the other one multiplies.
//
// Persistent CTAs: one producer thread, and two warpgroups of 64 j each, with all l. wgmma has left
// for its rows, in registers: a thread reads neighbouring l of rows n and n + 1 at once and puts
// both n of each l into one register, and adds them up meanwhile if BIAS. Of right wgmma reads rows
// of k from shared memory.
//
// Facts and struct Fixed: interleaved_gradient/tile.cuh.
#pragma once

#include "kronecker_sparse/interleaved_gradient/multiply.cuh"

__device__ __forceinline__ void load_stage(unsigned char* to, const Parameters& p, u64* barrier,
                                           const Tile& tile, int n) {
    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int box = 0; box < LEFT_BOXES; ++box)
        load_box(to + box * BOX_BYTES, p.left, barrier, tile.row * TILE_ROWS * LANES + box * ROW,
                 tile.block, n, 0);
    to += LEFT_BYTES;
#pragma unroll
    for (int box = 0; box < LANES * RIGHT_BOXES; ++box)
        load_box(to + box * BOX_BYTES, p.right, barrier,
                 tile.column * TILE_COLUMNS + box % RIGHT_BOXES * ROW, box / RIGHT_BOXES, n,
                 tile.block);
}

// What is read may still be under way when this kernel begins.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring ring(1);
    wait_for_prerequisites();
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        for (int stage = 0; stage < tile.depth; ++stage) {
            barrier_wait(&s.empty[ring.stage], ring.parity);
            load_stage(s.stages + ring.stage * STAGE_BYTES, p, &s.full[ring.stage], tile,
                       (tile.first + stage) * TILE_DEPTH);
            ring.next();
        }
    }
}

// The first of the two rows of which a thread has sums; the other one is eight behind it.
__device__ __forceinline__ int first_row(const Tile& tile, int warpgroup) {
    return tile.row * TILE_ROWS + warpgroup * 64 + threadIdx.x % 128 / 32 * 16 +
           threadIdx.x % 32 / 4;
}

// Row j of l = 0.
__device__ __forceinline__ float* line_of(const Parameters& p, const Tile& tile, int row) {
    i64 group = (i64(tile.split) * p.blocks + tile.block) * LANES;
    return p.partial + (group * p.rows + row) * p.pitch;
}

// The sums as they are, each pair of k side by side.
__device__ __forceinline__ void store_sums(const float (&sums)[LANES][SUMS], const Parameters& p,
                                           const Tile& tile, int warpgroup) {
    int first = tile.column * TILE_COLUMNS + threadIdx.x % 4 * 2;
    int row = first_row(tile, warpgroup), pitch = p.pitch - (BIAS ? 4 : 0);
    float* to = line_of(p, tile, row) + first;
#pragma unroll
    for (int l = 0; l < LANES; ++l) {
#pragma unroll
        for (int i = 0; i < SUMS; i += 2) {
            int line = i / 2 % 2 * 8, column = i / 4 * 8;
            if (row + line < p.rows && first + column < pitch) {
                Vector<float, 2> pair = {sums[l][i], sums[l][i + 1]};
                store_vector(to + i64(line) * p.pitch + column, pair);
            }
        }
        to += i64(p.rows) * p.pitch;
    }
}

// Those of left, of which each thread of a quad has some n: one number of four.
__device__ __forceinline__ void store_left(const float (&sums)[LANES][2], const Parameters& p,
                                           const Tile& tile, int warpgroup) {
    int row = first_row(tile, warpgroup);
    float* to = line_of(p, tile, row) + p.pitch - 4 + threadIdx.x % 4;
#pragma unroll
    for (int l = 0; l < LANES; ++l) {
        if (row < p.rows) *to = sums[l][0];
        if (row + 8 < p.rows) to[i64(8) * p.pitch] = sums[l][1];
        to += i64(p.rows) * p.pitch;
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // in a uniform register
    Ring ring(0);
    Fragments fragments(warpgroup);
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        float sums[LANES][SUMS], of_left[LANES][2] = {};
        multiply_tile(sums, of_left, s, fragments, tile.depth, ring);
        store_sums(sums, p, tile, warpgroup);
        if (BIAS && tile.column == 0) store_left(of_left, p, tile, warpgroup);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_sparse_interleaved_gradient(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];
    unsigned char* stages = shared + (-shared_address(shared) & 1023);
    Shared s = {stages, barriers, barriers + STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        release_registers<40>();
        if (threadIdx.x == 0) produce(parameters, s);
    } else {
        take_registers<232>();
        consume(parameters, s);
    }
}
