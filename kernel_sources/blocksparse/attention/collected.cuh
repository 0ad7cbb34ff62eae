// What kernels of gradients collect for captured tensors: sums of a row, or of a column, which are
// added up in registers, or an element of each pair of these.
//
// The generated source defines before it includes this file:
//   COLLECTED      captured tensors whose gradient is wanted of a launch, and of each
//   COLLECTED_AT   its number, and
//   IS_PAIR        whether it has both rows and columns
//   SUMMED         whether some of these are sums over batches or heads, which a CTA then takes one
//                  after the other
#pragma once

#include "blocksparse/attention/score.cuh"

// Sums for captured tensors, which begin as zeros. Of a pair of row and column one lane alone
// writes the sum over batches and heads, in their order.
template <int COUNT>
struct CollectedPointers {
    float* collected[COUNT];
    __device__ __forceinline__ float* collected_at(int index) const { return collected[index]; }
};
template <>
struct CollectedPointers<0> {
    __device__ __forceinline__ float* collected_at(int) const { return nullptr; }
};
template <int COUNT>
struct CollectedViews {
    CapturedStrides collected_views[COUNT];
    __device__ __forceinline__ CapturedStrides collected_view(int index) const {
        return collected_views[index];
    }
};
template <>
struct CollectedViews<0> {
    __device__ __forceinline__ CapturedStrides collected_view(int) const {
        return CapturedStrides();
    }
};

// Of captured tensors the gradients that a lane adds up, of its lines line and line + 8, or stores
// for each pair of row and column.
template <bool TURNED>
struct Collection {
    float sums[COLLECTED + (COLLECTED == 0)][2];

    template <int INDEX = 0, class Parameters, class Score>
    __device__ __forceinline__ void add(const Parameters& p, const Score& score, float gradient,
                                        float v, int row, int col, int half, int batch, int head) {
        if constexpr (INDEX < COLLECTED) {
            float x = gradient * score.template slope_of<COLLECTED_AT[INDEX]>(v, row, col);
            if (IS_PAIR[INDEX]) {
                CapturedStrides to = p.collected_view(INDEX);
                store(p.collected_at(INDEX) + batch * to.batch + head * to.head + row * to.row +
                          col * to.col, x);
            } else {
                sums[INDEX][half] += x;
            }
            add<INDEX + 1>(p, score, gradient, v, row, col, half, batch, head);
        }
    }

    __device__ __forceinline__ static void store(float* to, float x) { *to = SUMMED ? *to + x : x; }

    // Those of a head, of the lane's first line `line` of `lines`; they begin anew.
    template <class Parameters>
    __device__ __forceinline__ void store(const Parameters& p, int line, int lines, int batch,
                                          int head) {
#pragma unroll
        for (int index = 0; index < COLLECTED; ++index) {
            if (IS_PAIR[index]) continue;
            const CapturedStrides to = p.collected_view(index);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = sums[index][half];
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                const int own = line + 8 * half;
                if (threadIdx.x % 4 == 0 && own < lines)
                    store(p.collected_at(index) + batch * to.batch + head * to.head +
                              own * (TURNED ? to.col : to.row), sum);
                sums[index][half] = 0.0f;
            }
        }
    }
};
