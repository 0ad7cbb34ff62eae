// Sums of a tile's pairs by tensor cores (product/tile_of_words.cuh). Pairs that lose too much to
// cancellation are computed again, directly, by a warp.
//
// Facts, structs that a plan fixes, Finish and multiply(), one wgmma of 64 x WIDTH x 16 with its
// left operand in registers and one of 64 x TILE_N x 16 from shared memory: class ProductOfWords
// of kernlib/families/pairwise/kernels/product.py.
#pragma once

#include "pairwise/product/product.cuh"
#include "pairwise/product/tile_of_words.cuh"

struct OfWords {
    static constexpr bool IS_FOLDED = false;
    static constexpr int A_BYTES = ::A_BYTES, WORD_BYTES = ::WORD_BYTES;
    static constexpr int INFO_BYTES = ::INFO_BYTES, POINT_BYTES = ::POINT_BYTES;

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

    static __device__ __forceinline__ void sum_tile(float (&values)[VALUES], const Rows& rows,
                                                    const unsigned char* resident,
                                                    const unsigned char* stage,
                                                    const Parameters& parameters,
                                                    const Tile& tile) {
        const unsigned char* own = rows_of(resident, threadIdx.x / 128 - 1);
        if (multiply_tile(values, rows.info, own, stage)) return;
        auto points = reinterpret_cast<const PointInfo*>(stage + WORD_BYTES);
        mend_sums(values, rows, points, parameters, tile);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_product_main(const __grid_constant__ ProductLaunch launch) {
    multiply_values<OfWords>(launch);
}
