// Exponents of a tile's pairs by tensor cores: c |a - b|^2 as one product of the entries of
// product/fold.cuh, norms and scale among them, so that a value is no more than 2^x.
//
// Facts, structs that a plan fixes, Finish and multiply(), one wgmma of 64 x WIDTH x 16 with its
// left operand in registers and one of 64 x TILE_N x 16 from shared memory: class ProductFolded
// of kernlib/families/pairwise/kernels/product.py.
#pragma once

#include "pairwise/product/product.cuh"

constexpr int DEPTH = Config::DEPTH;    // entries as padded

struct Folded {
    static constexpr bool IS_FOLDED = true;
    static constexpr int A_BYTES = TILE_M * DEPTH * 2, WORD_BYTES = TILE_N * DEPTH * 2;
    static constexpr int INFO_BYTES = 0, POINT_BYTES = WORD_BYTES;

    struct Rows {
        i64 m[2];
        __device__ __forceinline__ Rows(const ProductLaunch&, i64, i64 first)
            : m{first, first + 8} {}
    };

    static __device__ __forceinline__ void sum_tile(float (&values)[VALUES], const Rows&,
                                                    const unsigned char* resident,
                                                    const unsigned char* stage,
                                                    const Parameters&, const Tile&) {
        u32 place = shared_address(resident) + (threadIdx.x / 128 - 1) * (64 * 16);
        u64 a = core_matrices_descriptor(place, TILE_M * 16, 128);
        u64 b = core_matrices_descriptor(shared_address(stage), TILE_N * 16, 128);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16, a += 2 * TILE_M, b += 2 * TILE_N)
            multiply(values, a, b, k > 0);
        wgmma_commit();
        wgmma_wait<0>();
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
pairwise_product_main(const __grid_constant__ ProductLaunch launch) {
    multiply_values<Folded>(launch);
}
