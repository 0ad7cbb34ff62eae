// Kronecker-sparse factors on Hopper, batch first and d > 1, where features of a group lie d apart:
//   y[n, i, j, l] = Finish(sum_k w[i, l, j, k] * x[n, i, k, l])
// Floors as in hopper/hopper.cuh. A tile takes LANES * HALVES neighbouring l together, so that
// whole sectors move; what limits it is the traffic from L2: every tile of TILE_COLUMNS features
// reads x again.
//
// 16 bytes of a tile of x are LANES neighbouring l of 8 / LANES (fp32: 4 / LANES) neighbouring k: a
// thread's loads become the registers of LANES independent wgmmas, in half types after one byte
// permute each. The order of k inside a wgmma is free, so thread t of a quad takes chunks 2t and
// 2t + 1 of a row, which the swizzle spreads over all banks; w is packed in that order. Of three l
// it takes 24 bytes, all l of four k.
//
// Facts and struct Fixed: interleaved/tile.cuh.
#pragma once

#include "common/async_copy.cuh"
#include "kronecker_sparse/interleaved/multiply.cuh"
#include "kronecker_sparse/interleaved/store.cuh"

__device__ __forceinline__ void load_weights(unsigned char* to, const Parameters& p, u64* barrier,
                                             const Tile& tile, int stage, int stages) {
    i64 place = i64(tile.block * p.spans + tile.lane / SPAN) * p.column_tiles + tile.column;
    load_bytes(to, p.packed + (place * stages + stage) * W_BYTES, barrier, W_BYTES);
}

template <class P>
__device__ __forceinline__ void load_boxes(unsigned char* to, const P& p, u64* barrier,
                                           const Tile& tile, int stage, int stages) {
    barrier_expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int block = 0; block < ROW_BLOCKS; ++block) {
        int first = stage * TILE_DEPTH * SPAN + block * ROW;
        load_box(to + block * X_BLOCK_BYTES, p.x, barrier, first, tile.block,
                 tile.row * TILE_ROWS, 0);
    }
    load_weights(to + X_BYTES, p, barrier, tile, stage, stages);
}

// By all producers, eight of them a row.
template <class P>
__device__ __forceinline__ void load_rows(unsigned char* to, const P& p, u64* barrier,
                                          const Tile& tile, int stage, int stages) {
    if (threadIdx.x == 0) {
        barrier_expect(barrier, W_BYTES);
        load_weights(to + X_BYTES, p, barrier, tile, stage, stages);
    }
    constexpr int CHUNKS = SPAN_BYTES / 16, STEP_ROWS = PRODUCERS / 8;
    int chunk = threadIdx.x % 8, line = threadIdx.x / 8, row = tile.row * TILE_ROWS + line;
    int l = tile.lane + chunk % CHUNKS * CHUNK, first = stage * TILE_DEPTH + chunk / CHUNKS;
    const InputT* from = p.x + row * p.x_row + tile.block * p.x_block + first * p.x_depth + l;
#pragma unroll 1
    for (int block = 0; block < ROW_BLOCKS; ++block) {
        bool exists = l < p.lanes && first + block * ROW_DEPTH < p.depth;
#pragma unroll
        for (int r = 0; r < TILE_ROWS; r += STEP_ROWS) {
            int place = (line + r) * ROW_BYTES + ((chunk ^ ((line + r) & SWIZZLE)) << 4);
            copy_async<16>(to + place, from + r * p.x_row, exists && row + r < p.rows ? 16 : 0);
        }
        to += X_BLOCK_BYTES;
        from += ROW_DEPTH * p.x_depth;
    }
    arrive_after_copies(barrier);
}

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    int depths = (p.depth + TILE_DEPTH - 1) / TILE_DEPTH;
    int stage = 0, parity = 1;
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        for (int depth = 0; depth < depths; ++depth) {
            barrier_wait(&s.empty[stage], parity);
            unsigned char* to = s.stages + stage * STAGE_BYTES;
            if constexpr (MERGED) load_boxes(to, p, &s.full[stage], tile, depth, depths);
            else load_rows(to, p, &s.full[stage], tile, depth, depths);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    int warpgroup = threadIdx.x / 128 - 1;
    int depths = (p.depth + TILE_DEPTH - 1) / TILE_DEPTH;
    int stage = 0, parity = 0, slot = 0;
    Finish finish(Read<Parameters>{p});
    for (u32 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile tile(p, index);
        float sums[LANES][SUMS];
        // Which TF32 overwrites; from undefined ones ptxas serialises its wgmma where epilogues go
        // over them, and 128 of them, whose epilogues do not, it would spill.
        if (!HALF_INPUT && LANES * SUMS < 128) {
#pragma unroll
            for (int l = 0; l < LANES; ++l)
#pragma unroll
                for (int i = 0; i < SUMS; ++i) sums[l][i] = 0.0f;
        }
        multiply_tile(sums, s, warpgroup, depths, stage, parity);
        store_tile(sums, finish, p, s.out, slot, tile, warpgroup);
    }
    if (MERGED && threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_sparse_interleaved(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES];
    unsigned char* base = shared + (-shared_address(shared) & 1023);
    Shared s = {base, base + STAGES * STAGE_BYTES, barriers, barriers + STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], MERGED ? 1 : 1 + PRODUCERS);
            barrier_init(&s.empty[i], 8);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        release_registers<40>();
        if (!MERGED || threadIdx.x == 0) produce(parameters, s);
    } else {
        take_registers<232>();
        consume(parameters, s);
    }
}
