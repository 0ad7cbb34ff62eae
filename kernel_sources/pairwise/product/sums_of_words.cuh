// Sums of a tile's pairs by tensor cores: products of the points' words (split/pack.cuh) and their
// norms. Pairs that lose too much to cancellation are computed again, directly, by a warp.
#pragma once

#include "pairwise/product/values.cuh"
#include "pairwise/split/direct.cuh"

constexpr int A_COPY = TILE_M * DEPTH * 2, B_COPY = TILE_N * DEPTH * 2;
constexpr int A_BYTES = COPIES * A_COPY, WORD_BYTES = COPIES * B_COPY;
constexpr int INFO_BYTES = TILE_N * sizeof(PointInfo);
constexpr int POINT_BYTES = WORD_BYTES + INFO_BYTES;
constexpr int RUN = 64;                 // features whose products are summed in one go

struct Rows {
    i64 l, m[2];
    PointInfo info[2];

    __device__ __forceinline__ Rows(const ProductLaunch& launch, i64 l, i64 first)
        : l(l), m{first, first + 8} {
        const PointInfo* from = launch.a_info + l * launch.a_info_stride + first;
        info[0] = from[0];
        info[1] = from[8];
    }
};

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

// Direct sums in the place of doubtful ones, for pairs that exist.
__device__ __forceinline__ void mend_sums(float (&values)[VALUES], const Rows& rows,
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
}

__device__ __forceinline__ void sum_tile(float (&values)[VALUES], const Rows& rows,
                                         const unsigned char* resident, const unsigned char* stage,
                                         const Parameters& parameters, const Tile& tile) {
    u32 a = shared_address(resident) + (threadIdx.x / 128 - 1) * (64 * 16);
    u32 b = shared_address(stage);
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
            const PointInfo &x = rows.info[e / 2], &y = right.element[e % 2];
            float norms = x.norm + y.norm;
            values[i + e] = scaled_sum(values[i + e], x.scale, y.scale, norms);
            fine = fine && !is_doubtful(values[i + e], norms);
        }
    }
    if (!__all_sync(~0u, fine)) mend_sums(values, rows, points, parameters, tile);
}
