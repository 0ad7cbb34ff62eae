// Sums of powers, and norms (sum_k |v_k|^p)^(1/p), of pairs whose sum has left the range in which
// it is accurate: the pair is computed again, of |v_k| / max |v|, which costs about as much as 2 to
// 10 pairs. In float alone. Behind sum_tile and before Rescale and Finish, to which a sum s < 0
// says that -s is the norm, or the sum of powers.
#pragma once

#include "common/exponential.cuh"
#include "common/math.cuh"
#include "pairwise/unit.cuh"

constexpr bool MENDED = sizeof(AccT) == 4 && (ROOTED || Inner::BY_LOGARITHM);

template <class Inner> constexpr bool IS_SQUARE = false;
template <> constexpr bool IS_SQUARE<Square> = true;
template <class Term> constexpr bool IS_DIFFERENCE = false;
template <class Inner> constexpr bool IS_DIFFERENCE<Difference<Inner>> = true;
template <class Inner> constexpr bool IS_DIFFERENCE<SwappedDifference<Inner>> = true;

// Squares of differences of numbers that are 0 or 2^-26 to 2^56 in size need no look at their sums:
// two of them are equal or 2^-50 apart at least, and 16 squares end below 2^118. Ordinary points
// are spaced so.
constexpr bool BY_SPACING = MENDED && IS_SQUARE<Inner> && IS_DIFFERENCE<Term>;

__device__ __forceinline__ bool is_spaced(float x) {
    float size = absolute(x);
    return size <= 7.2057594e16f && (size >= 1.4901161e-8f || size == 0.0f);
}
__device__ __forceinline__ bool is_spaced(double) { return true; }

// The sums that stay as they are. Powers below 2^-126 become zero, so that of a sum of 2^-100
// nothing is lost. With logarithms the error of a norm grows with log2 |v| in the unit of unit.cuh,
// and with its root it was 1.15e-6 between 2^8 and 2^12: the rounding of a logarithm doubles at 8.
struct Range {
    float least, most;

    __device__ __forceinline__ Range(float p, int features)
        : least(7.88860905e-31f), most(1.32922800e36f) {
        if (!Inner::BY_LOGARITHM) return;
        if (ROOTED && p != 2.0f) {
            float reach = fast_exp2(8.0f * p);
            least = fmaxf(least, float(features) / reach);
            most = fminf(most, float(features) * reach);
        }
        // Differences below 2^-126 of the unit count as 0, whose small powers may be worth
        // something beside those of others: not beside a mean that is 2^24 times as large.
        if (!ROOTED) least = fmaxf(least, float(features) * fast_exp2(24.0f - 126.0f * p));
        // The count and the maximum of p on the device, sums of absolute values and of squares.
        bool stays = is_plain(p) && !(ROOTED && p == 2.0f);
        if (stays || is_small(p)) least = -1.0f, most = infinity(p);
    }
    // A NaN, which no other way of summing removes, is not.
    __device__ __forceinline__ bool excludes(float s) const { return s < least || s > most; }
};

// The largest over the lanes that share a pair, and a sum: all of a warp, or one for itself.
__device__ __forceinline__ float largest_of_lanes(float largest, int step) {
    if (step == 1) return largest;
#pragma unroll 1
    for (int lane = 16; lane > 0; lane /= 2)
        largest = maximum(largest, __shfl_xor_sync(~0u, largest, lane));
    return largest;
}
__device__ __forceinline__ float sum_of_lanes(float sum, int step) {
    if (step == 1) return sum;
#pragma unroll 1
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
    return sum;
}

// Two factors that take |v| to a unit near the largest one, of which no reciprocal is a denormal or
// infinite: the unit of a norm is that number, of powers without a root a power of two above it.
struct PairUnit {
    float shift, reciprocal;

    __device__ __forceinline__ PairUnit(float largest, float p) {
        shift = largest < 1.0f ? 1.8446744e19f : 5.4210109e-20f;  // 2^64, 2^-64
        if (ROOTED) {
            reciprocal = 1.0f / (largest * shift);
            return;
        }
        int exponent = (__float_as_int(largest * shift) >> 23) - 126;
        // Half as far as the unit of a tile, so that powers of what is at most 1 leave float's
        // range where those of |v| do.
        exponent += largest < 1.0f ? -64 : 64;
        float whole = is_plain(p) ? 1.0f : reciprocal_unit(exponent, p, 0.5f * MOST_POWER);
        reciprocal = whole / shift;
    }
};

// By every `step`-th lane from `first` on: all of a warp, or one for itself with a step of 1.
template <class Input>
__device__ __noinline__ float sum_of_pair(const Input* a, const Input* b, i64 a_step, i64 b_step,
                                          int features, int first, int step, float p) {
    InnerNumbers<float> numbers = {p, 0.0f};
    float largest = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (int k = first; k < features; k += step) {
        float v = Term::of(convert<float>(a[k * a_step]), convert<float>(b[k * b_step]));
        largest = maximum(largest, absolute(v));
    }
    largest = largest_of_lanes(largest, step);
    if (largest == 0.0f || largest - largest != 0.0f) return largest;
    PairUnit unit(largest, p);
#pragma unroll 1
    for (int k = first; k < features; k += step) {
        float v = Term::of(convert<float>(a[k * a_step]), convert<float>(b[k * b_step]));
        sum = Inner::add(sum, v * unit.shift * unit.reciprocal, numbers);
    }
    sum = sum_of_lanes(sum, step);
    if constexpr (ROOTED) {
        if (IS_SQUARE<Inner>) return largest * sqrtf(sum);
        float exponent = 1.0f / p;
        return largest * norm_root(sum, exponent, fmaf(-exponent, p, 1.0f) / p);
    } else {
        float half = root_of_power(1.0f / (unit.shift * unit.reciprocal), p);
        return sum * half * half;
    }
}

// Replaces what `range` excludes among neighbouring sums of pairs (row, column + e), of which
// `odd` has a bit for each; all lanes of a warp call it together. Few features are a lane's own.
template <int N, class T, class Points>
__device__ __forceinline__ void replace_sums(Vector<T, N>& sums, u32 odd, int row, int column,
                                             const Points& a, const Points& b, float p) {
    int lane = threadIdx.x % 32;
    bool together = a.features > 32;
#pragma unroll 1
    while (u32 lanes = __ballot_sync(~0u, odd != 0)) {
        int m = row, n = column + __ffs(odd) - 1, source = together ? __ffs(lanes) - 1 : lane;
        m = __shfl_sync(~0u, m, source);
        n = __shfl_sync(~0u, n, source);
        float sum = 0.0f;
        if (together || odd)
            sum = sum_of_pair(a.data + m * a.point_stride, b.data + n * b.point_stride,
                              a.feature_stride, b.feature_stride, a.features, together ? lane : 0,
                              together ? 32 : 1, p);
        if (lane == source && odd) {
            int place = __ffs(odd) - 1;
#pragma unroll
            for (int e = 0; e < N; ++e)
                if (e == place) sums.element[e] = 0.0f - sum;  // no -0
            odd &= odd - 1;
        }
    }
}

// The same for what of them exists. Returns whether it has replaced any of the warp's.
template <int N, class T, class Points>
__device__ __forceinline__ bool mend_sums(Vector<T, N>& sums, int row, int column, const Points& a,
                                          const Points& b, const Range& range, float p) {
    if constexpr (MENDED) {
        u32 odd = 0;
#pragma unroll
        for (int e = 0; e < N; ++e) odd |= u32(range.excludes(sums.element[e])) << e;
        int inside = row < a.count ? max(0, min(N, b.count - column)) : 0;
        odd &= (1u << inside) - 1;
        if (!__any_sync(~0u, odd)) return false;
        replace_sums(sums, odd, row, column, a, b, p);
        return true;
    }
    return false;
}

// The same for a thread's COUNT vectors of a tile of sums, whose places in `total` `place` says.
// A function of its own: inlined, it takes registers from the loop over features, which then spills
// 13 of 128.
template <int COUNT, int N, class Place, class Points>
__device__ __noinline__ void mend_vectors(float* total, int line, Place place, Points a, Points b,
                                          float p) {
    Range range(p, a.features);
#pragma unroll 1
    for (int index = 0; index < COUNT; ++index) {
        int at = place(index);
        auto sums = load_vector<float, N>(total + at);
        if (mend_sums(sums, at / line, at % line, a, b, range, p)) store_vector(total + at, sums);
    }
}

// The same where there is anything to mend.
template <int COUNT, int N, class T, class Place, class Points>
__device__ __forceinline__ void mend_tile(T* total, int line, Place place, const Points& a,
                                          const Points& b, T p) {
    if constexpr (MENDED) mend_vectors<COUNT, N>(total, line, place, a, b, p);
}
