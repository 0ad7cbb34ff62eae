// Powers by logarithms are taken of differences in a unit near the largest ones of a tile: their
// relative error is about 6e-8 of the power's logarithm, 5e-6 for data of magnitude 1e20. The unit
// is a power of two, which changes no digit. It comes from a sample: pairs that are too far from it
// are computed anew, in a unit of their own (mend.cuh).
#pragma once

#include "common/types.cuh"
#include "pairwise/root_of_power.cuh"
#include "pairwise/terms.cuh"

using AccT = Config::AccT;    // arithmetic
using Inner = Config::Inner;  // a struct of terms.cuh
using Term = Config::Term;    // Difference, SwappedDifference or Dot of it
// Whether sums are under a root that makes them norms, and computed anew where they have left the
// range in which they are accurate: see is_norm of kernlib/families/pairwise/lowering/finish.py.
constexpr bool ROOTED = Config::BY_NORM;

constexpr bool SCALED = Inner::BY_LOGARITHM && sizeof(AccT) == 4;

// Of the logarithm of a unit's power: so its root, which Rescale multiplies by, is a normal number.
constexpr float MOST_POWER = 252.0f;

// Whether a p on the device is one whose powers take no logarithm.
__device__ __forceinline__ bool is_plain(float p) {
    return p == 0.0f || p == 1.0f || p == 2.0f || p == infinity(p);
}

// 2^-exponent, the reciprocal of a unit whose power has a logarithm of `most` at most. A root takes
// the unit out of its sum, and leaves no power of it.
__device__ __forceinline__ float reciprocal_unit(int exponent, float p, float most) {
    int reach = ROOTED ? 126 : int(fminf(most / fabsf(p), 126.0f));
    return __int_as_float((127 - min(max(exponent, -reach), reach)) << 23);
}

// Whether powers without a root need no unit: no number's logarithm times p is large.
__device__ __forceinline__ bool is_small(float p) { return !ROOTED && fabsf(p) < 0.25f; }

// The reciprocal of the unit for |v| with these bits.
__device__ __forceinline__ float unit_of(u32 largest, float p) {
    if (is_plain(p) || is_small(p) || largest == 0) return 1.0f;
    return reciprocal_unit(int(largest >> 23) - 127, p, MOST_POWER);
}

// A size in the bits of a float, which compare as it does; 0 for what is not finite.
__device__ __forceinline__ u32 finite_bits(float size) {
    return size - size == 0.0f ? __float_as_uint(size) : 0;
}

// The largest of what all threads of a block have, 0 for what is not finite.
__device__ __forceinline__ u32 largest_in_block(u32* shared, float size) {
    u32 bits = __reduce_max_sync(~0u, finite_bits(size));
    if (threadIdx.x == 0) *shared = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(shared, bits);
    __syncthreads();
    return *shared;
}

// The largest finite |v| that thread `first` of `step` finds; all of them together look at every
// feature of one pair of points or more.
template <class Points>
__device__ __forceinline__ float largest_sampled(const Points& a, const Points& b, int first,
                                                 int step) {
    int count = a.features > 0 ? max(a.features, step) : 0;
    float largest = 0.0f;
#pragma unroll 1
    for (int i = first; i < count; i += step) {
        i64 k = i % a.features;
        int m = i % a.count, n = (37u * i + 11u) % u32(b.count);  // wraps round
        float size = absolute(Term::of(convert<float>(a.data[m * a.point_stride +
                                                             k * a.feature_stride]),
                                       convert<float>(b.data[n * b.point_stride +
                                                             k * b.feature_stride])));
        largest = size - size == 0.0f ? fmaxf(largest, size) : largest;
    }
    return largest;
}

// The reciprocal of a tile's unit.
template <class Points>
__device__ __forceinline__ float sample_unit(u32* shared, const Points& a, const Points& b,
                                             float p) {
    return unit_of(largest_in_block(shared, largest_sampled(a, b, threadIdx.x, blockDim.x)), p);
}

// What turns a sum in a tile's unit into what Finish takes: of norms the sum as it is, and the unit
// beside it, else the sum times a power of the unit, in two steps that do not overflow. A sum s < 0
// says that -s is that already (mend.cuh).
struct Rescale {
    AccT unit = AccT(1), half = AccT(1);

    __device__ __forceinline__ explicit Rescale(const InnerNumbers<AccT>& numbers) {
        if constexpr (SCALED) {
            unit = 1.0f / numbers.unit;
            if (!ROOTED && unit != 1.0f) half = root_of_power(float(unit), float(numbers.p));
        }
    }
    __device__ __forceinline__ AccT operator()(AccT s) const {
        if constexpr (SCALED && !ROOTED) return s < AccT(0) ? -s : s * half * half;
        else return s;
    }
};
