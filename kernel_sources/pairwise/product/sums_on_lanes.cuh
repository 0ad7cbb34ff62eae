// Sums of a tile's pairs on the lanes, for few features: each thread has its two rows in registers
// and reads two neighbouring points at a time, which lie in lines (product/pack.cuh). 2 issue slots
// a feature for differences; exact, so that no pair is doubtful. Under a root 2 more a pair, and
// what is out of range is computed anew (mend.cuh).
//
// Facts, structs that a plan fixes, Finish and multiply(), one wgmma of 64 x WIDTH x 16 with its
// left operand in registers: class ProductOnLanes of
// kernlib/families/pairwise/kernels/product.py.
#pragma once

#include "pairwise/mend.cuh"
#include "pairwise/product/product.cuh"

constexpr int FEATURES = Config::FEATURES;

// What is odd among the sums of pairs that exist, anew.
template <class Rows>
__device__ __forceinline__ void mend_sums(float (&sums)[VALUES], const Rows& rows,
                                          const Parameters& p, const Tile& tile) {
    Range range(2.0f, FEATURES);
    u32 flags = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) flags |= u32(range.excludes(sums[i])) << i;
#pragma unroll 1
    while (flags) {
        int bit = __ffs(flags) - 1, column = column_of(bit);
        flags &= flags - 1;
        i64 m = row_of(bit) ? rows.m[1] : rows.m[0];
        if (column >= tile.columns || m >= p.m) continue;
        const InputT* a = p.a + rows.l * p.a_view.batch_stride + m * p.a_view.row_stride;
        const InputT* b =
            p.b + rows.l * p.b_view.batch_stride + (tile.n0 + column) * p.b_view.row_stride;
        float sum = 0.0f - sum_of_pair(a, b, p.a_view.column_stride, p.b_view.column_stride,
                                       FEATURES, 0, 1, 2.0f);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) sums[i] = i == bit ? sum : sums[i];
    }
}

struct OnLanes {
    static constexpr bool IS_FOLDED = false;
    static constexpr int A_BYTES = 0, POINT_BYTES = FEATURES * LINE_BYTES;
    static constexpr int WORD_BYTES = POINT_BYTES, INFO_BYTES = 0;

    struct Rows {
        i64 l, m[2];
        AccT points[2][FEATURES];

        __device__ __forceinline__ Rows(const ProductLaunch& launch, i64 l, i64 first)
            : l(l), m{first, first + 8} {
            const Parameters& p = launch;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                i64 row = min(m[i], p.m - 1);  // past the last one: never written
                const InputT* from = p.a + l * p.a_view.batch_stride + row * p.a_view.row_stride;
#pragma unroll
                for (int k = 0; k < FEATURES; ++k)
                    points[i][k] = convert<AccT>(from[k * p.a_view.column_stride]);
            }
        }
    };

    static __device__ __forceinline__ void sum_tile(float (&sums)[VALUES], const Rows& rows,
                                                    const unsigned char*,
                                                    const unsigned char* stage,
                                                    const Parameters& parameters,
                                                    const Tile& tile) {
        const float* lines = reinterpret_cast<const float*>(stage);
#pragma unroll
        for (int i = 0; i < VALUES; i += 4) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i + e] = 0.0f;
#pragma unroll
            for (int k = 0; k < FEATURES; ++k) {
                auto points = load_vector<float, 2>(lines + k * TILE_N + column_of(i));
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums[i + e] =
                        Term::add(sums[i + e], rows.points[e / 2][k], points.element[e % 2], {});
            }
        }
        if (ROOTED) mend_sums(sums, rows, parameters, tile);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_product_main(const __grid_constant__ ProductLaunch launch) {
    multiply_values<OnLanes>(launch);
}
