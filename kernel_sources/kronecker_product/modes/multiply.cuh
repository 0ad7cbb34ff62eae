// One mode of a tile: every slice times the mode's matrix, by tensor cores.
//
//   float, PRODUCTS 3   3xTF32: high * high + high * low + low * high, steps of 8 added in fp32
//   float, PRODUCTS 1   TF32, rounded to nearest
//   double              as IEEE has it
#pragma once

#include "kronecker_product/modes/arithmetic.cuh"

// Of fragment begin + i, from a step in depth on.
template <class M>
__device__ __forceinline__ void read_slices(Operand& a, const AccT* tile, const Warp<M>& warp,
                                            int begin, int i, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        bool exists = warp.exists(warp.slice(begin + i, half));
        int depth = step * 8 + warp.lane_column;
        if constexpr (M::R == 1 && M::P % 2 == 0) {
            Vector<AccT, 2> pair = {};
            if (exists && (M::P == M::DEPTH || depth < M::P)) {
                int from = place_of<M, M::P>(warp, begin, i, half, step * 8, warp.lane_column);
                pair = load_vector<AccT, 2>(tile + from);
            }
            a.value[half] = pair.element[0];
            a.value[half + 2] = pair.element[1];
        } else {
#pragma unroll
            for (int next = 0; next < 2; ++next) {
                bool there = exists && (M::P == M::DEPTH || depth + next < M::P);
                int from =
                    place_of<M, M::P>(warp, begin, i, half, step * 8 + next, warp.lane_column);
                a.value[half + 2 * next] = there ? tile[from] : AccT(0);
            }
        }
    }
}

// The matrix as a warp's fragments of it, where they take few registers.
template <class M>
struct Factors {
    static constexpr bool KEPT = M::STEPS * M::WARP_COLUMNS <= 4;
    Factor kept[KEPT ? M::STEPS : 1][M::WARP_COLUMNS];

    __device__ __forceinline__ void read(const AccT* matrix, const Warp<M>& warp) {
#pragma unroll
        for (int step = 0; step < (KEPT ? M::STEPS : 0); ++step)
            set(kept[step], matrix, warp, step);
    }
    __device__ __forceinline__ static void set(Factor (&b)[M::WARP_COLUMNS], const AccT* matrix,
                                               const Warp<M>& warp, int step) {
#pragma unroll
        for (int j = 0; j < M::WARP_COLUMNS; ++j) {
            if (!warp.has_column(j)) continue;
            int column = warp.column_tile(j) * 8 + warp.lane_row;
            const AccT* from = matrix + place(column * M::DEPTH + step * 8 + warp.lane_column);
            auto high = load_vector<AccT, 2>(from);
            if constexpr (M::SPLIT) b[j].set(high, load_vector<AccT, 2>(from + M::MATRIX));
            else b[j].set(high);
        }
    }
};

// ROWS fragments of slices, from the first on.
template <class M>
__device__ __forceinline__ void multiply(Sums<M>& sums, const AccT* tile, const AccT* matrix,
                                         const Factors<M>& factors, const Warp<M>& warp,
                                         int first) {
#pragma unroll(M::UNROLLED ? M::STEPS : M::ROWS * M::WARP_COLUMNS >= 8 ? 1 : 2)
    for (int step = 0; step < M::STEPS; ++step) {
        Factor b[M::WARP_COLUMNS];
        if constexpr (!Factors<M>::KEPT) Factors<M>::set(b, matrix, warp, step);
#pragma unroll
        for (int i = 0; i < M::ROWS; ++i) {
            if (!warp.has_row(first + i)) continue;
            Operand values;
            read_slices<M>(values, tile, warp, first, i, step);
            Slices a(values);
#pragma unroll
            for (int j = 0; j < M::WARP_COLUMNS; ++j) {
                if (!warp.has_column(j)) continue;
                auto& sum = sums.value[i][j];
                bool is_first = M::UNROLLED && step == 0;  // as the compiler knows
                if constexpr (Factors<M>::KEPT)
                    add_products(sum, a, factors.kept[step][j], is_first);
                else
                    add_products(sum, a, b[j], is_first);
            }
        }
    }
}
