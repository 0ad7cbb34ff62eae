// Reductions over n of Epilogue(Outer(sum_k (b[l,n,k] - a[l,m,k])^2)), or of sum_k a * b, by tensor
// cores at the accuracy of fp32: products as in split/split.cuh, reduced where that stores them. A
// block has TILE_M rows and walks over the tiles of its n (Part). Doubtful pairs and the gate as
// there; behind it waits reduce/tile.cuh or reduce/small.cuh.
//
// Floors on an H200: 6 operations (2 with one copy) a triple (m, n, k) over 770 TFLOP/s, and 7 + C
// issue slots a pair (of a Gaussian), 3.345e13 a second. 100000 x 100000, K = 64, C = 1: 5.0 and
// 2.4 ms. They go side by side where one warpgroup's products run while another one reduces, which
// ORDERED makes sure of.
//
// One producer thread, three warps that read v, WARPGROUPS warpgroups of 64 x TILE_N sums each.
//
// Facts, the structs that a plan fixes, Finish and multiply(), one wgmma of 64 x TILE_N x 16: class
// SplitReduce of kernlib/families/pairwise/kernels/split_reduce.py.
#pragma once

#include "pairwise/split/multiply.cuh"
#include "pairwise/split/reduce_rows.cuh"

constexpr int READERS = 96;              // threads that read v
constexpr int POINT_BYTES = TILE_N * sizeof(PointInfo);
constexpr int INFO_BYTES = POINT_BYTES + TILE_N * Reducer::COLUMNS * 4;
constexpr int LIST_BYTES = LISTED ? LISTS * (KEPT + WAITING) * 8 : 0;
static_assert(!LISTED || LISTS == 2 * 128 * WARPGROUPS, "two rows of a thread");
static_assert(Config::DYNAMIC_BYTES == RESIDENT * A_BYTES + STAGES * STAGE_BYTES +
                                           INFOS * INFO_BYTES + LIST_BYTES,
              "as the host counts it");

struct Packed {
    const u32* gate;
    const unsigned char* packed_a;
    const unsigned char* packed_b;
    const PointInfo* a_info;
    const PointInfo* b_info;
};

struct SplitLaunch : Packed, Parameters, FixedBehind {};
static_assert(sizeof(SplitLaunch) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    unsigned char* resident;
    unsigned char* stages;
    unsigned char* infos;
    u64 *full, *empty, *info_full, *info_empty, *resident_full;
};

// The part of this block, whose batch entry goes to l. Blocks that run at a time share few rows
// where those of all do not fit L2.
__device__ __forceinline__ Part place_part(const SplitLaunch& launch, i64& l) {
    u32 rows = launch.row_blocks, splits = launch.splits;
    l = blockIdx.x / (rows * splits);
    u32 inside = blockIdx.x % (rows * splits), first = inside / (RASTER_ROWS * splits);
    first *= RASTER_ROWS;
    inside -= first * splits;
    u32 group = min(rows - first, u32(RASTER_ROWS));
    return Part(launch, i64(first + inside % group) * TILE_M, int(inside / group));
}

__device__ __forceinline__ void produce(const SplitLaunch& p, const Shared& s, const Part& part,
                                        i64 l) {
    Ring<STAGES> stage(1);
    Ring<INFOS> info(1);
    const unsigned char* rows =
        p.packed_a + l * p.a_packed_stride + part.m0 / TILE_M * p.stages * A_BYTES;
    const unsigned char* b =
        p.packed_b + l * p.b_packed_stride + part.first / TILE_N * p.stages * B_BYTES;
    const PointInfo* points = p.b_info + l * p.b_info_stride + part.first;
    if (RESIDENT) {
        barrier_expect(s.resident_full, p.stages * A_BYTES);
        load_bytes(s.resident, rows, s.resident_full, p.stages * A_BYTES);
    }
#pragma unroll 1
    for (i64 n0 = part.first; n0 < part.last; n0 += TILE_N, points += TILE_N) {
        u64* barrier = &s.info_full[info.place];
        barrier_wait(&s.info_empty[info.place], info.parity);
        barrier_expect(barrier, POINT_BYTES);
        load_bytes(s.infos + info.place * INFO_BYTES, points, barrier, POINT_BYTES);
        info.advance();
        const unsigned char* a = rows;
#pragma unroll 1
        for (int i = 0; i < p.stages; ++i, a += A_BYTES, b += B_BYTES) {
            unsigned char* to = s.stages + stage.place * STAGE_BYTES;
            barrier = &s.full[stage.place];
            barrier_wait(&s.empty[stage.place], stage.parity);
            barrier_expect(barrier, STAGE_BYTES);
            if (!RESIDENT) load_bytes(to, a, barrier, A_BYTES);
            load_bytes(to + (STAGE_BYTES - B_BYTES), b, barrier, B_BYTES);
            stage.advance();
        }
    }
}

// The lines of v beside the tiles' PointInfo, by warps 1 to 3.
__device__ __forceinline__ void produce_weights(const SplitLaunch& p, const Shared& s,
                                                const Part& part, i64 l) {
    Ring<INFOS> info(1);
#pragma unroll 1
    for (i64 n0 = part.first; n0 < part.last; n0 += TILE_N) {
        float* weights = reinterpret_cast<float*>(s.infos + info.place * INFO_BYTES + POINT_BYTES);
        barrier_wait(&s.info_empty[info.place], info.parity);
        int columns = int(min(part.last - n0, i64(TILE_N)));
#pragma unroll 1
        for (int i = threadIdx.x - 32; i < columns; i += READERS)
            read_weights(weights + i * Reducer::COLUMNS, p, l, n0 + i);
        barrier_arrive_by_warp(&s.info_full[info.place]);
        info.advance();
    }
}

__device__ __forceinline__ void consume(const SplitLaunch& p, const Shared& s, const Part& part,
                                        i64 l) {
    Ring<STAGES> stage(0);
    Ring<INFOS> info(0);
    int warpgroup = threadIdx.x / 128 - 1, first = threadIdx.x % 4 * 2;
    i64 m = part.m0 + (threadIdx.x / 32 - 4) * 16 + threadIdx.x % 32 / 4;
    const PointInfo* left = p.a_info + l * p.a_info_stride + m;
    Rows rows = {l, {m, m + 8}, {left[0], left[8]}, {Reducer(first), Reducer(first)}};
    begin_lists(rows, reinterpret_cast<u64*>(s.infos + INFOS * INFO_BYTES), p.columns);
    Finish finish(ReadScalar{p, l});
    i64 diagonal = part.m0 + p.diagonal;  // n of the block's first row
    if (RESIDENT) barrier_wait(s.resident_full, 0);
    begin_turns(warpgroup);
#pragma unroll 1
    for (i64 n0 = part.first; n0 < part.last; n0 += TILE_N) {
        float sums[SUMS];
        multiply_tile(sums, s, warpgroup, p.stages, stage);
        barrier_wait(&s.info_full[info.place], info.parity);
        const unsigned char* points = s.infos + info.place * INFO_BYTES;
        Tile tile = {reinterpret_cast<const PointInfo*>(points),
                     reinterpret_cast<const float*>(points + POINT_BYTES), n0,
                     int(n0 - part.first), int(min(part.last - n0, i64(TILE_N)))};
        bool crossing = IN_PLACE && diagonal - n0 < TILE_N && diagonal - n0 > -TILE_M;
        reduce_tile(rows, sums, p, tile, finish, crossing);
        barrier_arrive_by_warp(&s.info_empty[info.place]);
        info.advance();
    }
    store_rows(rows, p, part);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_split_reduce(const __grid_constant__ SplitLaunch launch) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 barriers[2 * (STAGES + INFOS) + 1];
    if (*launch.gate > Config::DOUBTFUL) return;  // a kernel of the lanes does the work
    unsigned char* stages = dynamic + RESIDENT * A_BYTES;
    Shared s = {dynamic, stages, stages + STAGES * STAGE_BYTES,
                barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + INFOS,
                barriers + 2 * (STAGES + INFOS)};
    if (threadIdx.x == 0) {
        begin_barriers(s, Reducer::COLUMNS > 0 ? 1 + READERS / 32 : 1);
        barrier_init(s.resident_full, 1);
        fence_barrier_init();
    }
    __syncthreads();
    i64 l;
    Part part = place_part(launch, l);
    if (threadIdx.x < 128) {
        release_registers<(WARPGROUPS == 2 ? 40 : 32)>();
        if (threadIdx.x == 0) produce(launch, s, part, l);
        if (Reducer::COLUMNS > 0 && threadIdx.x >= 32) produce_weights(launch, s, part, l);
    } else {
        take_registers<(WARPGROUPS == 2 ? 232 : 160)>();
        consume(launch, s, part, l);
    }
}
