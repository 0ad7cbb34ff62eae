// One mode of a tile of half-precision numbers: the matrix, transposed, times eight slices, by
// tensor cores with sums in fp32.
#pragma once

#include "common/mma_half.cuh"
#include "kronecker_product/halves/tile.cuh"

// Fragments of the matrix: 16 columns by 16, or 8, in depth.
template <class M>
__device__ __forceinline__ void read_matrix(u32 (&a)[4], u32 matrix, int lane, int column_tile,
                                            int step) {
    bool is_tail = step == M::STEPS;
    int row = lane % 16, behind = is_tail ? 0 : lane / 16 * 8;
    int index = (column_tile * 16 + row) * M::P + step * 16 + behind;
    load_matrices<false>(a, matrix + 2 * place(index));
}

template <class M>
struct Kept {
    static constexpr int STEPS = M::KEPT ? M::STEPS + M::HAS_TAIL : 1;
    u32 a[STEPS][M::OWN_COLUMNS][4];

    __device__ __forceinline__ Kept(u32 matrix, int lane) {
        if (!M::KEPT) return;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int i = 0; i < M::OWN_COLUMNS; ++i)
                read_matrix<M>(a[step][i], matrix, lane, i, step);
    }
};

template <class M>
__device__ __forceinline__ void multiply_step(Sums<M>& sums, const u32 (&a)[M::OWN_COLUMNS][4],
                                              u32 tile, int lane, int first, int step) {
    constexpr int STRIDE = M::ACROSS ? M::R : 1;
    int row = lane % 8, lower = lane / 8 % 2 * 8;
    int slice = lane / 16 * 8 + (M::ACROSS ? 0 : row), behind = M::ACROSS ? lower + row : lower;
#pragma unroll
    for (int j = 0; j < M::OWN_SLICES; j += 2) {
        u32 b[4];
        int from = place_of<M, M::P>(first, j, slice, step * 16 * STRIDE, behind * STRIDE);
        load_matrices<M::ACROSS>(b, tile + 2 * from);
#pragma unroll
        for (int i = 0; i < M::OWN_COLUMNS; ++i) {
            multiply_fragments<HalfT>(sums.value[i][j], a[i], {b[0], b[1]});
            multiply_fragments<HalfT>(sums.value[i][j + 1], a[i], {b[2], b[3]});
        }
    }
}

template <class M>
__device__ __forceinline__ void multiply_tail(Sums<M>& sums, const u32 (&a)[M::OWN_COLUMNS][4],
                                              u32 tile, int lane, int first) {
    static_assert(M::OWN_SLICES == 2 || M::OWN_SLICES == 4, "of the four that are read at once");
    constexpr int STRIDE = M::ACROSS ? M::R : 1;
    int row = lane % 8;
    int tile_of_lane = lane / 8 % M::OWN_SLICES;
    int slice = tile_of_lane * 8 + (M::ACROSS ? 0 : row), behind = M::ACROSS ? row : 0;
    u32 b[4];
    int from = place_of<M, M::P>(first, 0, slice, M::STEPS * 16 * STRIDE, behind * STRIDE);
    load_matrices<M::ACROSS>(b, tile + 2 * from);
#pragma unroll
    for (int j = 0; j < M::OWN_SLICES; ++j)
#pragma unroll
        for (int i = 0; i < M::OWN_COLUMNS; ++i)
            multiply_short_fragments<HalfT>(sums.value[i][j], a[i][0], a[i][1], b[j]);
}

// OWN_COLUMNS tiles of columns from one on, by OWN_SLICES tiles of slices.
template <class M>
__device__ __forceinline__ void multiply(Sums<M>& sums, u32 tile, u32 matrix, const Kept<M>& kept,
                                         int lane, int first_column, int first_slice) {
#pragma unroll(M::KEPT ? 8 : 2)
    for (int step = 0; step < M::STEPS + M::HAS_TAIL; ++step) {
        u32 a[M::OWN_COLUMNS][4];
#pragma unroll
        for (int i = 0; i < M::OWN_COLUMNS; ++i) {
            if constexpr (M::KEPT) {
#pragma unroll
                for (int k = 0; k < 4; ++k) a[i][k] = kept.a[step][i][k];
            } else {
                bool exists = first_column + i < M::COLUMN_TILES;
                read_matrix<M>(a[i], matrix, lane, exists ? first_column + i : 0, step);
            }
        }
        if (M::HAS_TAIL && step == M::STEPS) {
            if constexpr (M::HAS_TAIL) multiply_tail<M>(sums, a, tile, lane, first_slice);
        } else {
            multiply_step<M>(sums, a, tile, lane, first_slice, step);
        }
    }
}
