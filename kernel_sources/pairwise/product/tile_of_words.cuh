// Sums of a tile's pairs by tensor cores: products of the points' words (split/pack.cuh) and their
// norms. A warpgroup has 64 rows of those that stay in shared memory, and all points of a stage.
#pragma once

#include "pairwise/product/values.cuh"
#include "pairwise/split/direct.cuh"

constexpr int DEPTH = Config::DEPTH;    // features of a sum as padded
constexpr int A_COPY = TILE_M * DEPTH * 2, B_COPY = TILE_N * DEPTH * 2;
constexpr int A_BYTES = COPIES * A_COPY, WORD_BYTES = COPIES * B_COPY;
constexpr int INFO_BYTES = TILE_N * sizeof(PointInfo);
constexpr int POINT_BYTES = WORD_BYTES + INFO_BYTES;
constexpr int RUN = 64;                 // features whose products are summed in one go

// Features `first` .. `last` of a warpgroup's rows times those of the stage.
__device__ __forceinline__ void multiply_points(float (&sums)[VALUES], u32 a_address, u32 b_address,
                                                int first, int last) {
    u64 a = core_matrices_descriptor(a_address, TILE_M * 16, 128);
    u64 b = core_matrices_descriptor(b_address, TILE_N * 16, 128);
    wgmma_fence();
#pragma unroll
    for (int k = first; k < last; k += 16) {
        u64 left = a + k / 16 * (2 * TILE_M), right = b + k / 16 * (2 * TILE_N);
        if (COPIES == 2) {
            multiply(sums, left + A_COPY / 16, right, k > first);
            multiply(sums, left, right + B_COPY / 16, 1);
        }
        multiply(sums, left, right, COPIES == 2 || k > first);
    }
    wgmma_commit();
    wgmma_wait<0>();
}

// Where a warpgroup's rows begin among those of the block.
__device__ __forceinline__ const unsigned char* rows_of(const unsigned char* resident, int group) {
    return resident + group * (64 * 16);
}

// The sums of a tile, of which a thread's two rows have `info`, and whether none of the warp's is
// doubtful. `rows` are those of the warpgroup.
__device__ __forceinline__ bool multiply_tile(float (&values)[VALUES], const PointInfo (&info)[2],
                                              const unsigned char* rows,
                                              const unsigned char* stage) {
    u32 a = shared_address(rows), b = shared_address(stage);
    multiply_points(values, a, b, 0, DEPTH < RUN ? DEPTH : RUN);
#pragma unroll
    for (int first = RUN; first < DEPTH; first += RUN) {
        float rest[VALUES];
        multiply_points(rest, a, b, first, first + RUN < DEPTH ? first + RUN : DEPTH);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) values[i] += rest[i];
    }
    auto points = reinterpret_cast<const PointInfo*>(stage + WORD_BYTES);
    bool fine = true;
#pragma unroll
    for (int i = 0; i < VALUES; i += 4) {
        auto right = load_vector<PointInfo, 2>(points + column_of(i));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const PointInfo &x = info[e / 2], &y = right.element[e % 2];
            float norms = x.norm + y.norm;
            values[i + e] = scaled_sum(values[i + e], x.scale, y.scale, norms);
            fine = fine && !is_doubtful(values[i + e], norms);
        }
    }
    return __all_sync(~0u, fine);
}

// Direct sums in the place of doubtful ones, for pairs that exist; which of the thread's these are.
// `rows` has l, m and info of its two rows, `tile` n0 and the columns that exist.
template <class Rows, class Parameters, class Tile>
__device__ __forceinline__ u32 mend_sums(float (&values)[VALUES], const Rows& rows,
                                         const PointInfo* points, const Parameters& parameters,
                                         const Tile& tile) {
    u32 flags = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        int column = column_of(i), row = row_of(i);
        float norms = rows.info[row].norm + points[column].norm;
        bool exists = column < tile.columns && rows.m[row] < parameters.m;
        flags |= u32(exists && is_doubtful(values[i], norms)) << i;
    }
    u32 lanes = __ballot_sync(~0u, flags);
#pragma unroll 1
    while (lanes) {
        int source = __ffs(lanes) - 1;
        lanes &= lanes - 1;
        u32 waiting = __shfl_sync(~0u, flags, source);
        i64 m[2] = {__shfl_sync(~0u, rows.m[0], source), __shfl_sync(~0u, rows.m[1], source)};
#pragma unroll 1
        while (waiting) {
            int bit = __ffs(waiting) - 1;
            i64 n = tile.n0 + bit / 4 * 8 + source % 4 * 2 + bit % 2;
            waiting &= waiting - 1;
            float sum = sum_directly(parameters, rows.l, bit / 2 % 2 ? m[1] : m[0], n);
            bool ours = threadIdx.x % 32 == source;
#pragma unroll
            for (int i = 0; i < VALUES; ++i) values[i] = ours && i == bit ? sum : values[i];
        }
    }
    return flags;
}
