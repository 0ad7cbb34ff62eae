// out[l,m,n] (+)= Epilogue(Outer(sum_k (b[l,n,k] - a[l,m,k])^2)), or of sum_k a * b, by tensor
// cores at the accuracy of fp32: the points of split/pack.cuh, whose products high * high +
// high * low + low * high are summed by wgmma, and |x|^2 + |y|^2 - 2 <x, y>. Pairs that
// lose too much to that (is_doubtful) are computed again, directly, by a warp; where the sample of
// split/pack.cuh found many, nothing is done here and direct/direct.cuh, launched behind, does the
// work.
//
// Floors on an H200: 6 operations (2 with one copy) a triple (m, n, k) over 770 TFLOP/s, 7.2 ms for
// 30000 x 30000 x 1024; the bytes of out over 3.4 TB/s.
//
// Wgmma truncates what it accumulates, by up to 8 * 2^-24 in 64 features: every PROMOTE stages the
// sums are added outside. While one warpgroup does that, the other one's products go on.
//
// Persistent CTAs: one producer thread, two warpgroups of 64 x TILE_N sums each; a tile is finished
// by each warp for itself, in parts of 32 columns that lie in shared memory for a moment.
//
// Facts, struct Fixed, Finish and multiply(), one wgmma of 64 x TILE_N x 16: class Split of
// kernlib/families/pairwise/kernels/split.py.
#pragma once

#include "pairwise/split/launch.cuh"
#include "pairwise/split/multiply.cuh"
#include "pairwise/split/store.cuh"

constexpr int INFO_BYTES = (TILE_M + TILE_N) * sizeof(PointInfo);
static_assert(Config::DYNAMIC_BYTES == STAGES * STAGE_BYTES + INFOS * INFO_BYTES +
                                           4 * WARPGROUPS * PART_BYTES, "as the host counts it");

struct Shared {
    unsigned char* stages;
    unsigned char* infos;
    float* parts;
    u64 *full, *empty, *info_full, *info_empty;
};

// The tiles of a CTA, every gridDim.x-th one, in groups of RASTER_ROWS rows walked along columns.
struct Walk {
    u32 index = blockIdx.x, base = 0;  // base: of the group's first tile
    int l = 0, group = 0;

    __device__ __forceinline__ bool next(const Parameters& p, Tile& tile) {
        for (; index < p.tiles; index += gridDim.x) {
            int first, rows, start;
            while (true) {
                first = group * RASTER_ROWS;
                rows = min(p.tiles_m - first, RASTER_ROWS);
                start = SYMMETRIC ? first * TILE_M / TILE_N : 0;
                u32 size = u32(rows) * (p.tiles_n - start);
                if (index - base < size) break;
                base += size;
                if (++group * RASTER_ROWS >= p.tiles_m) group = 0, ++l;
            }
            int inside = index - base;
            tile = {l, first + inside % rows, start + inside / rows};
            if (!SYMMETRIC || (tile.column + 1) * TILE_N > tile.row * TILE_M) {
                index += gridDim.x;
                return true;
            }
        }
        return false;
    }
};

__device__ __forceinline__ void produce(const Parameters& p, const Shared& s) {
    Ring<STAGES> stage(1);
    Ring<INFOS> info(1);
    Walk walk;
    Tile tile;
    while (walk.next(p, tile)) {
        u64* barrier = &s.info_full[info.place];
        unsigned char* to = s.infos + info.place * INFO_BYTES;
        barrier_wait(&s.info_empty[info.place], info.parity);
        barrier_expect(barrier, INFO_BYTES);
        load_bytes(to, p.a_info + tile.l * p.a_info_stride + i64(tile.row) * TILE_M, barrier,
                   TILE_M * sizeof(PointInfo));
        load_bytes(to + TILE_M * sizeof(PointInfo),
                   p.b_info + tile.l * p.b_info_stride + i64(tile.column) * TILE_N, barrier,
                   TILE_N * sizeof(PointInfo));
        info.advance();
        const unsigned char* a =
            p.packed_a + tile.l * p.a_packed_stride + i64(tile.row) * p.stages * A_BYTES;
        const unsigned char* b =
            p.packed_b + tile.l * p.b_packed_stride + i64(tile.column) * p.stages * B_BYTES;
        for (int i = 0; i < p.stages; ++i, a += A_BYTES, b += B_BYTES) {
            barrier = &s.full[stage.place];
            to = s.stages + stage.place * STAGE_BYTES;
            barrier_wait(&s.empty[stage.place], stage.parity);
            barrier_expect(barrier, STAGE_BYTES);
            load_bytes(to, a, barrier, A_BYTES);
            load_bytes(to + A_BYTES, b, barrier, B_BYTES);
            stage.advance();
        }
    }
}

__device__ __forceinline__ void consume(const Parameters& p, const Shared& s) {
    Ring<STAGES> stage(0);
    Ring<INFOS> info(0);
    Walk walk;
    Tile tile;
    int warpgroup = threadIdx.x / 128 - 1;
    begin_turns(warpgroup);
    while (walk.next(p, tile)) {
        float sums[SUMS];
        multiply_tile(sums, s, warpgroup, p.stages, stage);
        barrier_wait(&s.info_full[info.place], info.parity);
        const PointInfo* points = reinterpret_cast<PointInfo*>(s.infos + info.place * INFO_BYTES);
        store_tile(sums, p, points, s.parts, tile);
        barrier_arrive_by_warp(&s.info_empty[info.place]);
        info.advance();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_split(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 barriers[2 * (STAGES + INFOS)];
    if (*parameters.gate > Config::DOUBTFUL) return;  // the direct kernel does the work
    unsigned char* infos = dynamic + STAGES * STAGE_BYTES;
    Shared s = {dynamic, infos, reinterpret_cast<float*>(infos + INFOS * INFO_BYTES),
                barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + INFOS};
    if (threadIdx.x == 0) {
        begin_barriers(s, 1);
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
