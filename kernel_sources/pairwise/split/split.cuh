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
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT    storage of a and b, float, storage of out
//   TILE_N                   columns of a tile, a multiple of 32
//   DEPTH, STAGES            features of a stage, a multiple of 16; stages in shared memory
//   COPIES                   2 for high and low words and three products, else 1 and one
//   PROMOTE                  stages whose products are summed in one go; 0 for all
//   ORDERED                  whether warpgroups issue their products in turns
//   SYMMETRIC                b is a: only tiles that reach the diagonal from above are computed
//   DIFFERENCE               distances, else dot products
//   GATED                    the count of doubtful pairs in the sample that leaves nothing to do
//   SCALARS, Finish, BY_NORM as in direct/direct.cuh
//   multiply(...)            one wgmma of 64 x TILE_N x 16
//   PARAMETER_BYTES          what lowering makes of Parameters
#pragma once

#include "common/hopper.cuh"
#include "pairwise/scalars.cuh"
#include "pairwise/split/parameters.cuh"
#include "pairwise/terms.cuh"

using Inner = Square;  // where sums are under a root
using Term = Difference<Inner>;

constexpr int WARPGROUPS = 2, TILE_M = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int SUMS = TILE_N / 2;         // accumulators of a thread
constexpr int RASTER_ROWS = 16;          // tile rows walked together, so that operands stay in L2

constexpr int A_COPY = TILE_M * DEPTH * 2, B_COPY = TILE_N * DEPTH * 2;
constexpr int A_BYTES = COPIES * A_COPY, B_BYTES = COPIES * B_COPY;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int INFOS = 4;                 // tiles whose PointInfo is there
constexpr int INFO_BYTES = (TILE_M + TILE_N) * sizeof(PointInfo);
constexpr int PART = 32, PARTS = TILE_N / PART;
constexpr int PART_BYTES = 16 * PART * 4;
static_assert(DYNAMIC_BYTES == STAGES * STAGE_BYTES + INFOS * INFO_BYTES +
                                   4 * WARPGROUPS * PART_BYTES, "as lowering counts it");

// Laid out by kernlib/families/pairwise/lowering/split.py.
struct Parameters {
    // written at each launch
    const InputT* a;
    const InputT* b;
    OutputT* out;
    const u32* gate;
    const unsigned char* packed_a;
    const unsigned char* packed_b;
    const PointInfo* a_info;
    const PointInfo* b_info;
    Scalar scalars[SCALARS];
    // fixed by the plan
    i64 scalar_strides[SCALARS];
    View a_view, b_view, out_view;   // (batch, point, feature) of a and b, (batch, m, n) of out
    i64 a_packed_stride, b_packed_stride, a_info_stride, b_info_stride;  // of batch entries
    i64 diagonal;                    // n - m of the entries that receive the regularization
    int m, n, k, stages;             // stages of a tile
    int tiles_m, tiles_n;
    u32 tiles;                       // in all
    int out_vectors;                 // whether out takes aligned stores of 4 elements
    int accumulate, padding;
};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

using ReadScalar = ScalarReader<Parameters>;

struct Shared {
    unsigned char* stages;
    unsigned char* infos;
    float* parts;
    u64 *full, *empty, *info_full, *info_empty;
};

struct Tile {
    int l, row, column;
};

#include "pairwise/split/multiply.cuh"

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

#include "pairwise/split/store.cuh"

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
    if (*parameters.gate > GATED) return;
    unsigned char* infos = dynamic + STAGES * STAGE_BYTES;
    Shared s = {dynamic, infos, reinterpret_cast<float*>(infos + INFOS * INFO_BYTES),
                barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + INFOS};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        for (int i = 0; i < INFOS; ++i) {
            barrier_init(&s.info_full[i], 1);
            barrier_init(&s.info_empty[i], 4 * WARPGROUPS);
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
