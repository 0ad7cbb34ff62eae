// Norms (sum_k |v_k|^p)^(1/p) whose sum of powers has left the range in which it is accurate: the
// pair is computed again, of |v_k| / max |v|, which costs about as much as 2 to 10 pairs. In float
// alone. Behind sum_tile and before Finish, to which a sum s < 0 says that -s is the norm.
//
// The generated source defines BY_NORM to have it: see
// kernlib/families/pairwise/lowering/finish.py.
#pragma once

#include "common/exponential.cuh"
#include "common/math.cuh"

// The sums that stay as they are. Powers below 2^-126 become zero, so that of a sum of 2^-100
// nothing is lost. With logarithms the error of a norm grows with log2 |v| in the unit of unit.cuh,
// and with its root it was 1.15e-6 between 2^8 and 2^12: the rounding of a logarithm doubles at 8.
struct Range {
    float least, most;

    __device__ __forceinline__ Range(float p, int features)
        : least(7.88860905e-31f), most(1.32922800e36f) {
        if (!Inner::BY_LOGARITHM) return;
        float reach = fast_exp2(8.0f * p);
        if (p != 2.0f) {
            least = fmaxf(least, float(features) / reach);
            most = fminf(most, float(features) * reach);
        }
        // The count and the maximum of p on the device, and sums of absolute values.
        if (p == 0.0f || p == 1.0f || p == infinity(p)) least = -1.0f, most = infinity(p);
    }
    // A NaN, which no other way of summing removes, is not.
    __device__ __forceinline__ bool excludes(float s) const { return s < least || s > most; }
};

// By every `step`-th lane from `first` on: all of a warp, or one for itself with a step of 1.
__device__ __noinline__ float norm_of_pair(const InputT* a, const InputT* b, i64 a_step, i64 b_step,
                                           int features, int first, int step, float p) {
    InnerNumbers<float> numbers = {p, 0.0f};
    float largest = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (int k = first; k < features; k += step) {
        float v = Term::of(convert<float>(a[k * a_step]), convert<float>(b[k * b_step]));
        largest = maximum(largest, absolute(v));
    }
    if (step > 1) {
#pragma unroll 1
        for (int lane = 16; lane > 0; lane /= 2)
            largest = maximum(largest, __shfl_xor_sync(~0u, largest, lane));
    }
    if (largest == 0.0f || largest - largest != 0.0f) return largest;
    // In two steps, so that the reciprocal of no number is a denormal or infinite.
    float shift = largest < 1.0f ? 1.8446744e19f : 5.4210109e-20f;
    float unit = 1.0f / (largest * shift);
#pragma unroll 1
    for (int k = first; k < features; k += step) {
        float v = Term::of(convert<float>(a[k * a_step]), convert<float>(b[k * b_step]));
        sum = Inner::add(sum, v * shift * unit, numbers);
    }
    if (step > 1) {
#pragma unroll 1
        for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    }
    float exponent = 1.0f / p;
    return largest * norm_root(sum, exponent, fmaf(-exponent, p, 1.0f) / p);
}

// Replaces what `range` excludes among neighbouring sums of pairs (row, column + e), of which
// `odd` has a bit for each; all lanes of a warp call it together. Few features are a lane's own.
template <int N, class Points>
__device__ __forceinline__ void replace_sums(Vector<float, N>& sums, u32 odd, int row, int column,
                                             const Points& a, const Points& b, float p) {
    int lane = threadIdx.x % 32;
    bool together = a.features > 32;
#pragma unroll 1
    while (u32 lanes = __ballot_sync(~0u, odd != 0)) {
        int m = row, n = column + __ffs(odd) - 1, source = together ? __ffs(lanes) - 1 : lane;
        m = __shfl_sync(~0u, m, source);
        n = __shfl_sync(~0u, n, source);
        float norm = 0.0f;
        if (together || odd)
            norm = norm_of_pair(a.data + m * a.point_stride, b.data + n * b.point_stride,
                                a.feature_stride, b.feature_stride, a.features,
                                together ? lane : 0, together ? 32 : 1, p);
        if (lane == source && odd) {
            int place = __ffs(odd) - 1;
#pragma unroll
            for (int e = 0; e < N; ++e)
                if (e == place) sums.element[e] = -norm;
            odd &= odd - 1;
        }
    }
}

// The same for what of them exists.
template <int N, class Points>
__device__ __forceinline__ void mend_norms(Vector<float, N>& sums, int row, int column,
                                           const Points& a, const Points& b, const Range& range,
                                           float p) {
    u32 odd = 0;
#pragma unroll
    for (int e = 0; e < N; ++e) odd |= u32(range.excludes(sums.element[e])) << e;
    int inside = row < a.count ? max(0, min(N, b.count - column)) : 0;
    odd &= (1u << inside) - 1;
    if (__any_sync(~0u, odd)) replace_sums(sums, odd, row, column, a, b, p);
}
