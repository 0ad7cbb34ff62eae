// Kronecker-sparse factors on Hopper, whose copy engine makes the stride of the permutation free:
//   y[n; i,j,l] = Finish(sum_k w[i,l,j,k] * x[n; i,k,l])
// for n of the batch, with features or the batch contiguous.
// Floors: (a*d*(b+c)*batch + a*b*c*d) * itemsize bytes over 4.3 TB/s on an H200; 2*a*b*c*d*batch
// operations over 770 TFLOP/s in half types, 138 in 3xTF32, 415 in TF32.
//
// Persistent CTAs: one producer thread, two warpgroups that multiply 64 rows of the batch each. A
// tile is 128 rows of the batch by TILE_COLUMNS output features of one group (i, l); where its
// weights fit (RESIDENT), tiles that share them follow each other, so that they are read once,
// or by each CTA of a team where y is most of what moves.
//
// Facts and struct Fixed: hopper/tile.cuh.
#pragma once

#include "kronecker_sparse/hopper/multiply.cuh"
#include "kronecker_sparse/hopper/store.cuh"

// The tiles of a CTA: those that all CTAs compute at the same time are neighbours or, where weights
// stay, those that a team of them does. A team of one computes neighbours one after the other.
// A team's share of the tiles is its share of the CTAs: none has more than the mean, rounded up.
struct Range {
    u32 first, last, step;
    template <class P>
    __device__ __forceinline__ explicit Range(const P& p) {
        first = blockIdx.x;
        last = p.tiles;
        step = gridDim.x;
        if constexpr (RESIDENT > 0) {
            u32 teams = p.teams, team = blockIdx.x % teams;
            u32 size = gridDim.x / teams, larger = gridDim.x % teams;  // teams of one CTA more
            u32 before = team * size + min(team, larger);  // CTAs of the teams before
            step = size + (team < larger);
            first = u64(p.tiles) * before / gridDim.x + blockIdx.x / teams;
            last = u64(p.tiles) * (before + step) / gridDim.x;
        }
    }
};

template <class P>
__device__ __forceinline__ void load_weights(unsigned char* to, const P& p, u64* barrier,
                                             const Tile& tile, int block) {
    int column = tile.column * TILE_COLUMNS, k = block * TILE_DEPTH;
    if constexpr (PACKED) {
        i64 pair = i64(tile.block) * p.lanes + tile.lane;
        i64 place = (pair * p.column_tiles + tile.column) * tile.depth + block;
        load_bytes(to, p.packed + place * W_BYTES, barrier, W_BYTES);
    } else if (RIGHT_LINES) {
#pragma unroll
        for (int part = 0; part < W_PARTS; ++part)
            load_box(to + part * TILE_DEPTH * ROW_BYTES, p.w, barrier, column + part * ROW,
                     tile.lane, k, tile.block);
    } else {
        load_box(to, p.w, barrier, k, tile.lane, column, tile.block);
    }
}

__device__ __forceinline__ void load_stage(unsigned char* to, const Parameters& p, u64* barrier,
                                           const Tile& tile, int block) {
    barrier_expect(barrier, STAGE_BYTES);
    int row = tile.row * TILE_ROWS, k = block * TILE_DEPTH;
    if (BATCH_LAST) {
#pragma unroll
        for (int part = 0; part < TILE_ROWS / ROW; ++part)
            load_box(to + part * TILE_DEPTH * ROW_BYTES, p.x, barrier, row + part * ROW, tile.lane,
                     k, tile.block);
    } else {
        load_box(to, p.x, barrier, k, tile.lane, row, tile.block);
    }
    if (!RESIDENT) load_weights(to + X_BYTES, p, barrier, tile, block);
}

// Packed weights may still be under way when this kernel begins: who reads them waits. Where they
// stay, x waits with them, though it was there earlier: loaded first, it made (1,256,256,16) 2 us
// slower.
__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    int stage = 0, parity = 1, group = -1, groups = 0;
    if (PACKED && !RESIDENT) wait_for_prerequisites();
    Range range(p);
    for (u32 index = range.first; index < range.last; index += range.step) {
        Tile tile(p, index);
        if (RESIDENT && tile.group != group) {
            if (PACKED && groups == 0) wait_for_prerequisites();
            barrier_wait(s.weights_empty, (groups & 1) ^ 1);
            barrier_expect(s.weights_full, tile.depth * W_BYTES);
            for (int block = 0; block < tile.depth; ++block)
                load_weights(s.weights + block * W_BYTES, p, s.weights_full, tile, block);
            group = tile.group;
            ++groups;
        }
        for (int block = 0; block < tile.depth; ++block) {
            barrier_wait(&s.empty[stage], parity);
            load_stage(s.stages + stage * STAGE_BYTES, p, &s.full[stage], tile, tile.first + block);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    int warpgroup = threadIdx.x / 128 - 1;
    int stage = 0, parity = 0, group = -1, groups = 0, slot = 0;
    Finish finish(Read<Parameters>{p});
    Range range(p);
    for (u32 index = range.first; index < range.last; index += range.step) {
        Tile tile(p, index);
        if (RESIDENT && tile.group != group) {
            barrier_wait(s.weights_full, groups & 1);
            group = tile.group;
            ++groups;
        }
        float sums[SUMS];
        if (!HALF_INPUT) {  // which TF32 overwrites; from undefined ones ptxas serialises its wgmma
#pragma unroll
            for (int i = 0; i < SUMS; ++i) sums[i] = 0.0f;
        }
        multiply_tile(sums, s, warpgroup, p.depth - tile.first * TILE_DEPTH, tile.depth, stage,
                      parity);
        u32 next = index + range.step;
        if (RESIDENT && (next >= range.last || next / p.row_tiles != index / p.row_tiles)) {
            if (threadIdx.x % 32 == 0) barrier_arrive(s.weights_empty);
        }
        if constexpr (PARTIAL) {
            store_partial(sums, p, tile, warpgroup);
        } else {
            store_tile(sums, finish, p, s.out + warpgroup * OUT_PARTS * PART_BYTES, slot, tile,
                       warpgroup);
        }
    }
    if (threadIdx.x % 128 == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
kronecker_sparse_hopper(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ u64 barriers[2 * STAGES + 2];
    unsigned char* base = shared + (-shared_address(shared) & 1023);
    Shared s = {base, base + RESIDENT_BYTES, base + RESIDENT_BYTES + STAGES * STAGE_BYTES,
                barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + 1};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        barrier_init(s.weights_full, 1);
        barrier_init(s.weights_empty, 4 * WARPGROUPS);
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
