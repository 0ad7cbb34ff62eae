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
    static constexpr int COUNT = COLLECTED + (COLLECTED == 0);
    float sums[COUNT][2];
    float known[COUNT][8];  // SUMMED: of pairs of a group of columns, what earlier heads have left

    // Reads that for a group's elements, all at once: one after the other each would be waited for.
    template <class Parameters>
    __device__ __forceinline__ void fetch(const Parameters& p, int row, int col, int batch,
                                          int head) {
        if (!SUMMED) return;
#pragma unroll
        for (int index = 0; index < COLLECTED; ++index) {
            if (!IS_PAIR[index]) continue;
            const CapturedStrides to = p.collected_view(index);
            const float* from = p.collected_at(index) + batch * to.batch + head * to.head;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int own_row = row + j % 4 / 2 * 8, own_col = col + j / 4 * 8 + j % 2;
                const bool exists = own_row < p.sizes.queries && own_col < p.sizes.keys;
                known[index][j] = exists ? from[own_row * to.row + own_col * to.col] : 0.0f;
            }
        }
    }

    // Of element j of the group.
    template <int INDEX = 0, class Parameters, class Score>
    __device__ __forceinline__ void add(const Parameters& p, const Score& score, float gradient,
                                        float v, int row, int col, int j, int batch, int head) {
        if constexpr (INDEX < COLLECTED) {
            float x = gradient * score.template slope_of<COLLECTED_AT[INDEX]>(v, row, col);
            if (IS_PAIR[INDEX]) {
                CapturedStrides to = p.collected_view(INDEX);
                p.collected_at(INDEX)[batch * to.batch + head * to.head + row * to.row +
                                      col * to.col] = SUMMED ? known[INDEX][j] + x : x;
            } else {
                sums[INDEX][j % 4 / 2] += x;
            }
            add<INDEX + 1>(p, score, gradient, v, row, col, j, batch, head);
        }
    }

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
                float* at = p.collected_at(index) + batch * to.batch + head * to.head +
                            own * (TURNED ? to.col : to.row);
                if (threadIdx.x % 4 == 0 && own < lines) *at = SUMMED ? *at + sum : sum;
                sums[index][half] = 0.0f;
            }
        }
    }
};
