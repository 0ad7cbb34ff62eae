// The products of a tile by wgmma, each warpgroup's 64 lines of results, 64 columns at a time. Of
// two words a number the products of the lower ones come first, while sums are small, and sums are
// at most 64 deep: the matrix unit truncates what it accumulates, by 2^-24 of it on average.
//
// The generated source has `multiply`, of 64 columns and with its left operand in shared memory or
// in registers (kernlib/lowering/wgmma.py).
#pragma once

#include "kronecker_product/hopper/matrices.cuh"

constexpr int STEP_UNITS = LINE_BYTES;  // from 16 rows to the next, of 16 bytes
constexpr int OWN = 32;                 // a thread's sums of 64 x 64

template <class R>
struct Sums {
    float of[R::COLUMNS / 64][OWN];
    __device__ __forceinline__ float& operator[](int i) { return of[i / OWN][i % OWN]; }
    __device__ __forceinline__ float operator[](int i) const { return of[i / OWN][i % OWN]; }
    static constexpr int COUNT = R::COLUMNS / 2;
};

// Sums over DEPTH of products with 64 columns: `left(word, step)` is the left operand's 16 from
// 16 * step on.
template <int DEPTH, class Left>
__device__ __forceinline__ void multiply_columns(float (&sums)[OWN], const Left& left, u64 right,
                                                 int low_units) {
    constexpr int CHAINS = WORDS == 2 ? DEPTH / 64 : 1, STEPS = DEPTH / 16 / CHAINS;
    float more[CHAINS > 1 ? OWN : 1];
    wgmma_fence();
#pragma unroll
    for (int chain = 0; chain < CHAINS; ++chain) {
        auto add = [&](int word, int step, int right_word, bool is_first) {
            const u64 b = right + (chain * STEPS + step) * STEP_UNITS + right_word * low_units;
            if constexpr (CHAINS > 1) {
                if (chain > 0) {
                    multiply(more, left(word, chain * STEPS + step), b, !is_first);
                    return;
                }
            }
            multiply(sums, left(word, chain * STEPS + step), b, !is_first);
        };
        if constexpr (WORDS == 2) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                add(1, step, 0, step == 0);
                add(0, step, 1, false);
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; ++step) add(0, step, 0, WORDS == 1 && step == 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    if constexpr (CHAINS > 1) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) sums[i] += more[i];
    }
}

// Sums of the first matrix's columns with the panel.
template <class R>
__device__ __forceinline__ void multiply_panel(Sums<R>& sums, const unsigned char* matrices,
                                               const unsigned char* panel) {
    const int warpgroup = threadIdx.x % GROUP_THREADS / 128;
    const u64 matrix = matrix_descriptor(
        shared_address(matrices) + warpgroup * (LINES * LINE_BYTES), LINES * LINE_BYTES,
        8 * LINE_BYTES);
    const u64 right = matrix_descriptor(shared_address(panel), LINES * LINE_BYTES, 8 * LINE_BYTES);
    auto left = [&](int word, int step) {
        return matrix + word * (R::First::BYTES / 16) + step * STEP_UNITS;
    };
#pragma unroll
    for (int half = 0; half < R::COLUMNS / 64; ++half)
        multiply_columns<LINES>(sums.of[half], left, right + half * LINES * LINE_BYTES / 16,
                                PANEL_BYTES / 16);
}

// A thread's sums as the left operand of another product, whose depths are their columns.
template <class R>
struct Fragments {
    u32 word[WORDS][R::COLUMNS / 16][4];
    __device__ __forceinline__ explicit Fragments(const Sums<R>& sums) {
#pragma unroll
        for (int i = 0; i < R::COLUMNS / 16; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float one = sums[8 * i + 2 * k], other = sums[8 * i + 2 * k + 1];
                if constexpr (WORDS == 2) {
                    const Pair pair(one, other);
                    word[0][i][k] = pair.high;
                    word[1][i][k] = pair.low;
                } else {
                    word[0][i][k] = pack<HalfT>(one, other);
                }
            }
    }
};

// Sums of the fragments with the second matrix.
template <class R>
__device__ __forceinline__ void multiply_fragments(Sums<R>& sums, const Fragments<R>& a,
                                                   const unsigned char* matrices) {
    constexpr int ROWS_BYTES = R::COLUMNS * LINE_BYTES;
    const u64 right = matrix_descriptor(shared_address(matrices) + WORDS * R::First::BYTES,
                                        ROWS_BYTES, 8 * LINE_BYTES);
    auto left = [&](int word, int step) -> const u32(&)[4] { return a.word[word][step]; };
#pragma unroll
    for (int half = 0; half < R::COLUMNS / 64; ++half)
        multiply_columns<R::COLUMNS>(sums.of[half], left, right + half * ROWS_BYTES / 16,
                                     R::Second::BYTES / 16);
}

// Scales a warp's sums so that half precision holds them; the exponent of the power.
template <class R>
__device__ __forceinline__ int scale_sums(Sums<R>& sums, bool& are_zeros) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < Sums<R>::COUNT; ++i) most = fmaxf(most, fabsf(sums[i]));
    const u32 bits = __reduce_max_sync(~0u, __float_as_uint(most));
    are_zeros = bits == 0;
    const int shift = shift_to(14, bits);
    const float power = power_of_two(shift);
#pragma unroll
    for (int i = 0; i < Sums<R>::COUNT; ++i) sums[i] *= power;
    return shift;
}
