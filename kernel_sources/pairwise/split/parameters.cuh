// What the launches of a split product share: split/centre.cuh, split/pack.cuh, split/split.cuh.
//
// A point x of K features becomes (x - centre) * 2^e with e such that its largest feature is near
// 2^14, and that two words of fp16: high and, unless one product of high words is enough, low, the
// rest. Relative to the largest feature the rest is exact to 2^-39, so that low needs no scale.
#pragma once

#include "common/types.cuh"

constexpr bool DIFFERENCE = Config::DIFFERENCE;  // squared distances, else dot products
constexpr int CHUNK = 8;       // features of 16 bytes: a row of wgmma's core matrices
constexpr int TOP = 14;        // binary exponent of a point's largest feature in fp16
constexpr float LARGEST_NORM = 4.2535296e37f;  // 2^125: the sum of two norms is finite
// A squared distance below TAU of the sum of both norms has lost too many bits to cancellation: at
// an error of 8 * 2^-24 of that sum, what is not below it has a relative error of 8e-6.
constexpr float TAU = 1.0f / 32;
// Beside it a squared distance of less than this, below which squares are denormals: in the sample
// of split/pack.cuh, and where a root of it may be a number that is none (mend.cuh).
constexpr float LEAST_SQUARES = 7.88860905e-31f;  // 2^-100

// Of a packed point: |x - centre|^2, or 0 in dot products, but NaN where pairs must be computed
// directly, as a feature is not finite or the norm too large; and what its fp16 numbers are to be
// multiplied by, -2 included for the points of a in distances.
struct alignas(8) PointInfo {
    float norm, scale;
};

// A sum from the product of two points' words, the scales of both, and their norms. Points of 1e-20
// have scales whose product is 0; the first step overflows for points of a dot product alone.
__device__ __forceinline__ float scaled_sum(float product, float left, float right, float norms) {
    return DIFFERENCE ? fmaf(product * left, right, norms) : fmaf(product, left * right, norms);
}

// Whether a sum computed as `value` needs another, direct, computation.
__device__ __forceinline__ bool is_doubtful(float value, float norms) {
    if (Config::BY_NORM) return !(value >= fmaf(TAU, norms, LEAST_SQUARES));
    return DIFFERENCE ? !(value >= TAU * norms) : value != value;
}
