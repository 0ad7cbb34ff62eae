// The sum of one pair as the direct kernels take it, by a warp: for pairs that lose too much as
// |x|^2 + |y|^2 - 2 <x, y>. By norm, minus the norm where that sum has left its range (mend.cuh).
#pragma once

#include "common/math.cuh"
#include "pairwise/mend.cuh"
#include "pairwise/split/parameters.cuh"

using InputT = Config::InputT;  // storage of a and b

// Sums of products, which overflow on either side, are double: a lane's infinity of one float and
// the product of two others that another lane has would meet as a NaN. So are those of norms, which
// in double stay in range: a call of sum_of_pair would take registers from the tile of sums.
template <bool DOUBLE> struct DirectSum { using Type = float; };
template <> struct DirectSum<true> { using Type = double; };

// Of points m of a and n of b in batch entry l. `p` has a, b, a_view, b_view and k.
template <class Parameters>
__device__ __forceinline__ float sum_directly(const Parameters& p, i64 l, i64 m, i64 n) {
    i64 a_step = p.a_view.column_stride, b_step = p.b_view.column_stride;
    const InputT* a = p.a + l * p.a_view.batch_stride + m * p.a_view.row_stride;
    const InputT* b = p.b + l * p.b_view.batch_stride + n * p.b_view.row_stride;
    using Sum = DirectSum<!DIFFERENCE || ROOTED>::Type;
    Sum sum = 0;
#pragma unroll 4
    for (int k = threadIdx.x % 32; k < p.k; k += 32) {
        float x = convert<float>(a[k * a_step]), y = convert<float>(b[k * b_step]);
        sum = multiply_add(Sum(DIFFERENCE ? y - x : x), Sum(DIFFERENCE ? y - x : y), sum);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (!ROOTED || !Range(2.0f, p.k).excludes(float(sum))) return float(sum);
    // By float's root, in units of 2^100 or 2^-100.
    bool small = sum < 1.0;
    float root = sqrtf(float(sum * (small ? 1.6069380442589903e60 : 6.2230152778611417e-61)));
    return 0.0f - root * (small ? 7.88860905e-31f : 1.26765060e30f);
}
