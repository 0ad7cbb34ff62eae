// log sum_n exp(x[n]) in float: a reducer as those of common/reducers.cuh, that takes scores in
// groups. Each takes a maximum, a multiplication and addition, 2^x and the sum; what was summed is
// scaled once a group that has a larger score, which few have.
#pragma once

#include "common/approximate.cuh"

// Sizes up to which log2(e) times a score is finite. A score beyond counts as infinite.
constexpr float MOST_SCORE = 2.3e38f, LEAST_SCORE = -2.3e38f, LN_2 = 0.6931471805599453f;

struct LogSums {
    static constexpr int COLUMNS = 0, OUTPUTS = 1;
    static constexpr bool LINEAR = false, INDEXED = false;
    // Sums are of 2^(x log2(e) - origin), rounded once, where origin is near largest * log2(e).
    float largest = LEAST_SCORE, origin = LEAST_SCORE * LOG2_E, run = 0.0f, total = 0.0f;

    __device__ __forceinline__ LogSums(int = 0) {}

    __device__ __forceinline__ void raise(float to) {
        if (!(to > largest)) return;
        largest = fminf(to, MOST_SCORE);
        float before = origin;
        origin = largest * LOG2_E;
        float scale = exp2_approximate(before - origin);
        run *= scale;
        total *= scale;
    }

    // A score that is not above the largest, but if that is infinite.
    __device__ __forceinline__ void add_below(float x) {
        run += exp2_approximate(fmaf(x, LOG2_E, -origin));
    }

    __device__ __forceinline__ void add(float x, int, const float*) {
        raise(x);
        add_below(x);
    }

    template <int COUNT>
    __device__ __forceinline__ void add_group(const float (&x)[COUNT]) {
        float most = x[0];
#pragma unroll
        for (int i = 1; i < COUNT; ++i) most = fmaxf(most, x[i]);
        raise(most);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) add_below(x[i]);
    }

    __device__ __forceinline__ void settle() { total = add_chain(total, run); }

    __device__ __forceinline__ void merge(LogSums other) {
        raise(other.largest);
        other.raise(largest);
        total += other.total;
    }

    // What rounded the origin is no part of the result.
    __device__ __forceinline__ float output(int) const {
        float rest = fmaf(largest, LOG2_E, -origin);
        return largest + fmaf(-rest, LN_2, logf(total));
    }
    __device__ __forceinline__ int index() const { return 0; }
};

template <class Reducer>
constexpr bool TAKES_GROUPS = false;
template <>
constexpr bool TAKES_GROUPS<LogSums> = true;
