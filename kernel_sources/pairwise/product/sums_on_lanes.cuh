// Sums of a tile's pairs on the lanes, for few features: each thread has its two rows in registers
// and reads two neighbouring points at a time, which lie in lines (product/pack.cuh). 2 issue slots
// a feature for differences; exact, so that no pair is doubtful.
#pragma once

#include "pairwise/product/values.cuh"
#include "pairwise/terms.cuh"

using Term = OPERATION<INNER>;

constexpr int POINT_BYTES = FEATURES * LINE_BYTES, A_BYTES = 0;

struct Rows {
    i64 m[2];
    AccT points[2][FEATURES];

    __device__ __forceinline__ Rows(const ProductLaunch& launch, i64 l, i64 first)
        : m{first, first + 8} {
        const Parameters& p = launch.parameters;
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

__device__ __forceinline__ void sum_tile(float (&sums)[VALUES], const Rows& rows,
                                         const unsigned char*, const unsigned char* stage,
                                         const Parameters&, const Tile&) {
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
}
