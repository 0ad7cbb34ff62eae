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
// The generated source defines, beside what reduce/reduce.cuh needs:
//   WARPGROUPS, TILE_N       rows of a block by 64; columns of a tile, a multiple of 64
//   DEPTH, STAGES            features of a stage, a multiple of 16; stages in shared memory
//   RESIDENT                 stages of a that stay in shared memory for all of a block's tiles, at
//                            least as many as there are; 0 where they travel with b's
//   COPIES, PROMOTE, DIFFERENCE, multiply(...)   as for split/split.cuh
//   ORDERED                  whether warpgroups issue their products in turns
//   ROLLED                   whether a tile is reduced in a loop, for the code of Finish is long
//   DOUBTFUL                 the count of doubtful pairs in the sample that leaves nothing to do
//   KEPT                     if defined: the reducer is a list of topk/nearest.cuh
//   DYNAMIC_BYTES, PARAMETER_BYTES   shared memory and SplitLaunch as lowering counts them
#pragma once

#include "common/hopper.cuh"
#include "pairwise/reduce/reduce.cuh"
#include "pairwise/split/parameters.cuh"

constexpr int TILE_M = 64 * WARPGROUPS;
constexpr int THREADS = 128 * (WARPGROUPS + 1);
constexpr int READERS = 96;              // threads that read v
constexpr int SUMS = TILE_N / 2;         // accumulators of a thread
constexpr int RASTER_ROWS = 16;          // blocks of rows side by side, so that a stays in L2

constexpr int A_COPY = TILE_M * DEPTH * 2, B_COPY = TILE_N * DEPTH * 2;
constexpr int A_BYTES = COPIES * A_COPY, B_BYTES = COPIES * B_COPY;
constexpr int STAGE_BYTES = (RESIDENT > 0 ? 0 : A_BYTES) + B_BYTES;
constexpr int INFOS = 3;                 // tiles whose PointInfo and lines of v are there
constexpr int POINT_BYTES = TILE_N * sizeof(PointInfo);
constexpr int INFO_BYTES = POINT_BYTES + TILE_N * Reducer::COLUMNS * 4;
#ifdef HAS_LISTS
constexpr int LIST_BYTES = LISTS * (KEPT + WAITING) * 8;
static_assert(LISTS == 2 * 128 * WARPGROUPS, "two rows of a thread");
#else
constexpr int LIST_BYTES = 0;
#endif
static_assert(DYNAMIC_BYTES == RESIDENT * A_BYTES + STAGES * STAGE_BYTES + INFOS * INFO_BYTES +
                                   LIST_BYTES, "as lowering counts it");

// Laid out by kernlib/families/pairwise/lowering/split_reduce.py.
struct SplitLaunch {
    // written at each launch, as the beginning of Parameters
    const u32* gate;
    const unsigned char* packed_a;
    const unsigned char* packed_b;
    const PointInfo* a_info;
    const PointInfo* b_info;
    Parameters parameters;
    // fixed by the plan
    i64 a_packed_stride, b_packed_stride, a_info_stride, b_info_stride;  // of batch entries
    int stages, splits;                  // stages of a tile
};
static_assert(sizeof(SplitLaunch) == PARAMETER_BYTES, "as lowering lays it out");

struct Shared {
    unsigned char* resident;
    unsigned char* stages;
    unsigned char* infos;
    u64 *full, *empty, *info_full, *info_empty, *resident_full;
};

// The part of this block, whose batch entry goes to l. Blocks that run at a time share few rows
// where those of all do not fit L2.
__device__ __forceinline__ Part place_part(const SplitLaunch& launch, i64& l) {
    u32 rows = launch.parameters.row_blocks, splits = launch.splits;
    l = blockIdx.x / (rows * splits);
    u32 inside = blockIdx.x % (rows * splits), first = inside / (RASTER_ROWS * splits);
    first *= RASTER_ROWS;
    inside -= first * splits;
    u32 group = min(rows - first, u32(RASTER_ROWS));
    return Part(launch.parameters, i64(first + inside % group) * TILE_M, int(inside / group));
}

#include "pairwise/split/multiply.cuh"
#include "pairwise/split/reduce_rows.cuh"

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
            read_weights(weights + i * Reducer::COLUMNS, p.parameters, l, n0 + i);
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
#ifdef HAS_LISTS
    u64* lists = reinterpret_cast<u64*>(s.infos + INFOS * INFO_BYTES) + threadIdx.x - 128;
    rows.reducers[0].begin(lists, p.parameters.columns);
    rows.reducers[1].begin(lists + LISTS / 2, p.parameters.columns);
#endif
    Finish finish(ReadScalar{p.parameters, l});
    i64 diagonal = part.m0 + p.parameters.diagonal;  // n of the block's first row
    if (RESIDENT) barrier_wait(s.resident_full, 0);
    begin_turns(warpgroup);
#pragma unroll 1
    for (i64 n0 = part.first; n0 < part.last; n0 += TILE_N) {
        float sums[SUMS];
        multiply_tile<(RESIDENT > 0)>(sums, s, warpgroup, p.stages, stage);
        barrier_wait(&s.info_full[info.place], info.parity);
        const unsigned char* points = s.infos + info.place * INFO_BYTES;
        Tile tile = {reinterpret_cast<const PointInfo*>(points),
                     reinterpret_cast<const float*>(points + POINT_BYTES), n0,
                     int(n0 - part.first), int(min(part.last - n0, i64(TILE_N)))};
        bool crossing = IN_PLACE && diagonal - n0 < TILE_N && diagonal - n0 > -TILE_M;
        reduce_tile(rows, sums, p.parameters, tile, finish, crossing);
        barrier_arrive_by_warp(&s.info_empty[info.place]);
        info.advance();
    }
    store_rows(rows, p.parameters, part);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_split_reduce(const __grid_constant__ SplitLaunch launch) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ u64 barriers[2 * (STAGES + INFOS) + 1];
    if (*launch.gate > DOUBTFUL) return;
    unsigned char* stages = dynamic + RESIDENT * A_BYTES;
    Shared s = {dynamic, stages, stages + STAGES * STAGE_BYTES,
                barriers, barriers + STAGES, barriers + 2 * STAGES, barriers + 2 * STAGES + INFOS,
                barriers + 2 * (STAGES + INFOS)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], 4 * WARPGROUPS);
        }
        for (int i = 0; i < INFOS; ++i) {
            barrier_init(&s.info_full[i], Reducer::COLUMNS > 0 ? 1 + READERS / 32 : 1);
            barrier_init(&s.info_empty[i], 4 * WARPGROUPS);
        }
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
