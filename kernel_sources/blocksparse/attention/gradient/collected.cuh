// What kernels of gradients collect for captured tensors: sums of a row, or of a column, which are
// added up in registers, or an element of each pair of these.
//
// The generated source defines before it includes this file, of each captured tensor whose gradient
// is wanted of a launch:
//   COLLECTED_AT   its number, and
//   IS_PAIR        whether it has both rows and columns
#pragma once

#include "blocksparse/attention/score.cuh"

constexpr int COLLECTED = Config::COLLECTED;  // captured tensors whose gradient is wanted
// Whether some of these are sums over batches or heads, which a CTA then takes one after the other.
constexpr bool SUMMED = Config::SUMMED;

// Sums for captured tensors, which begin as zeros. Of a pair of row and column one lane alone
// writes the sum over batches and heads, in their order.
template <int COUNT>
struct CollectedPointers {
    float* collected[COUNT];
};
template <>
struct CollectedPointers<0> {};

// Where the sum of a captured tensor begins, and its strides; of none nothing.
template <class Parameters>
__device__ __forceinline__ float* collected_at(const Parameters& p, int index) {
    if constexpr (COLLECTED > 0) return p.collected[index];
    return nullptr;
}
template <class Parameters>
__device__ __forceinline__ CapturedStrides strides_of(const Parameters& p, int index) {
    if constexpr (COLLECTED > 0) return p.collected_strides[index];
    return CapturedStrides();
}

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
            const CapturedStrides to = strides_of(p, index);
            const float* from = collected_at(p, index) + batch * to.batch + head * to.head;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int own_row = row + j % 4 / 2 * 8, own_col = col + j / 4 * 8 + j % 2;
                const bool exists = own_row < p.queries && own_col < p.keys;
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
                CapturedStrides to = strides_of(p, INDEX);
                collected_at(p, INDEX)[batch * to.batch + head * to.head + row * to.row +
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
            const CapturedStrides to = strides_of(p, index);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = sums[index][half];
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
                const int own = line + 8 * half;
                float* at = collected_at(p, index) + batch * to.batch + head * to.head +
                            own * (TURNED ? to.col : to.row);
                if (threadIdx.x % 4 == 0 && own < lines) *at = SUMMED ? *at + sum : sum;
                sums[index][half] = 0.0f;
            }
        }
    }
};
