// What becomes of logits, and the parameters of a launch that every kernel of attention has.
//
// The generated source defines struct Score, of one batch and head, before it includes this file
// (lowering/attention/score_struct.py). What depends on these alone is computed in its constructor:
//   Score(const Captured* captured, int batch, int head)
//   float operator()(float v, int row, int col) const    the logit in the place of v, both in
//                                                        natural units
//   float slope(float v, int row, int col) const         its derivative by v
//   bool keeps(int row, int col) const                   false for what the mask leaves out
//   template <int K> float slope_of(float v, int row, int col) const
//                                                        its derivative by captured tensor K
// Kernels call the first two with HAS_SCORE alone and keeps() with HAS_MASK alone, for a row and a
// column that exist, and slope_of<K>() for tensors whose gradient is wanted.
#pragma once

#include "blocksparse/attention/captured.cuh"
#include "blocksparse/attention/dropout.cuh"
#include "blocksparse/attention/walk.cuh"

constexpr bool HAS_SCORE = Config::HAS_SCORE;  // whether logits are changed
constexpr bool HAS_MASK = Config::HAS_MASK;    // whether a mask leaves some out
constexpr bool CAUSAL = Config::CAUSAL;        // what leaves them out by their position
constexpr bool WINDOW = Config::WINDOW;
constexpr bool LENGTHS = Config::LENGTHS;
constexpr bool DROPOUT = Config::DROPOUT;
constexpr int CAPTURED = Config::CAPTURED;  // how many tensors score and mask read

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// What a float leaves of a log-sum-exp, which is the sum of the largest logit and of the logarithm
// of a sum of exponentials relative to it: times log2 e. Of a row that a mask adds the least float
// to it is the whole of the latter. Kernels of gradients find weights by both numbers.
__device__ __forceinline__ float rest_of(float lse, float most, float of_sum) {
    const float rest = (of_sum - (lse - most)) * LOG2_E;
    return fabsf(rest) <= 3.402823466e38f ? rest : 0.0f;  // of what is not finite there is none
}

constexpr int NO_END = 1 << 30;  // what a matrix has of rows and columns at most

// The parts of a parameter block, in this order behind the kernel's own pointers: empty where there
// is nothing, as base classes are and members are not.
template <bool>
struct LengthPointers {
    const int* q_lengths;   // of each batch
    const int* kv_lengths;
    __device__ __forceinline__ int rows_seen(int batch, int all) const {
        return max(0, min(all, q_lengths[batch]));
    }
    __device__ __forceinline__ int cols_seen(int batch, int all) const {
        return max(0, min(all, kv_lengths[batch]));
    }
    // The same, but without an end where all are seen. That is asked of the length itself: ptxas of
    // CUDA 13.0 makes of `rows_seen(...) == all` a predicate of VIMNMX.RELU that does not hold.
    __device__ __forceinline__ int rows_open(int batch, int all) const {
        return q_lengths[batch] < all ? max(0, q_lengths[batch]) : NO_END;
    }
    __device__ __forceinline__ int cols_open(int batch, int all) const {
        return kv_lengths[batch] < all ? max(0, kv_lengths[batch]) : NO_END;
    }
};
template <>
struct LengthPointers<false> {
    __device__ __forceinline__ int rows_seen(int, int all) const { return all; }
    __device__ __forceinline__ int cols_seen(int, int all) const { return all; }
    __device__ __forceinline__ int rows_open(int, int) const { return NO_END; }
    __device__ __forceinline__ int cols_open(int, int) const { return NO_END; }
};

template <int COUNT>
struct CapturedPointers {
    const void* captured[COUNT];
};
template <>
struct CapturedPointers<0> {};

// The numbers of a call.
struct Numbers {
    Scalar scale, left, right;  // of logits; of the window, int64 where they are on the device
    Scalar dropout, seed;       // its probability; an int64 there, a whole number below 2**53 here
};

using Sight = Band<WINDOW, WINDOW || CAUSAL>;

// What the rows of a batch see by position, of a matrix of so many rows and columns.
template <class Parameters>
__device__ __forceinline__ Sight sight_of(const Parameters& p, int batch, int rows, int cols) {
    constexpr i64 MOST = NO_END;  // no wider window shows more, and sums stay ints
    Sight sight = {p.rows_seen(batch, rows), p.cols_seen(batch, cols), 0, 0};
    if (WINDOW) {
        sight.left = int(min(max(read_scalar<i64>(p.left, 0), -MOST), MOST));
        sight.right = int(min(max(read_scalar<i64>(p.right, 0), -MOST), MOST));
    }
    if (CAUSAL) sight.right = WINDOW ? min(sight.right, 0) : 0;
    return sight;
}

template <class Score, class Parameters>
__device__ __forceinline__ Score score_of(const Parameters& p, int batch, int head) {
    Captured captured[CAPTURED + (CAPTURED == 0)];
    if constexpr (CAPTURED > 0) {
#pragma unroll
        for (int i = 0; i < CAPTURED; ++i) {
            CapturedStrides strides = p.captured_strides[i];
            captured[i] = {p.captured[i], strides.batch, strides.head, strides.row, strides.col};
        }
    }
    return Score(captured, batch, head);
}

template <class Parameters>
__device__ __forceinline__ Dropout dropout_of(const Parameters& p, u32 head) {
    return DROPOUT ? Dropout(read_scalar<float>(p.dropout, 0), read_scalar<i64>(p.seed, 0), head)
                   : Dropout(0.0f, 0, head);
}
