// The softmax of rows whose scores come tile by tile.
#pragma once

#include "blocksparse/attention/hopper/scores.cuh"
#include "common/mma_half.cuh"
#include "common/exponential.cuh"

// Scores may be that much larger than those that weights are relative to, in units of ln 2, before
// these are lowered: so that sums of values are multiplied once or twice a row and not at each
// tile. A weight is 2^8 then at most, which storage and sums hold as exactly as 1.
constexpr float SLACK = 8.0f;
constexpr float LARGE = 16777216.0f;  // beyond which neighbouring floats are 2 apart and more

constexpr int STEPS = TILE_COLS / STEP;
using Weights = u32[STEPS][4];              // as wgmma takes a left operand from registers

// Of a thread's two rows: the score that weights are relative to, and the sum of the thread's own
// weights. `factor` takes scores to units of ln 2, and is above 0.
struct Rows {
    float factor, most[2], sum[2];

    __device__ __forceinline__ explicit Rows(float factor)
        : factor(factor), most{minus_infinity(), minus_infinity()}, sum{0.0f, 0.0f} {}

    // What takes scores to exponents of weights. A logit of a score may be no float any more times
    // the factor: there it is taken times what is left of it. Of others the rounding makes weights
    // smaller alone, all of a row alike, which counts nowhere.
    __device__ __forceinline__ float shift_of(int h) const {
        if (most[h] == minus_infinity()) return 0.0f;
        return HAS_SCORE ? -most[h] : __fmul_rd(-most[h], factor);
    }

    // Whether that rounding may have left nothing of weights. No sum of them is NaN then.
    __device__ __forceinline__ bool is_large(int h) const {
        return !HAS_SCORE && fabsf(most[h]) <= 3.402823466e38f && sum[h] == sum[h] &&
               fabsf(most[h] * factor) > LARGE;
    }

    // Weights in the place of scores. Answers what the sums before, of weights and values, are to
    // be multiplied by; whether that is 1 for all rows of the warp.
    __device__ __forceinline__ bool add(float (&scores)[SCORES], float (&shrink)[2]) {
        bool rises[2];
        float shift[2], fresh[2][2] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top[2] = {scores[2 * h], scores[2 * h + 1]};
#pragma unroll
            for (int i = 4; i < SCORES; i += 4) {
                top[0] = fmaxf(top[0], scores[i + 2 * h]);
                top[1] = fmaxf(top[1], scores[i + 2 * h + 1]);
            }
            float next = fmaxf(most[h], fmaxf(top[0], top[1]));
            next = fmaxf(next, __shfl_xor_sync(ALL_LANES, next, 1));
            next = fmaxf(next, __shfl_xor_sync(ALL_LANES, next, 2));
            rises[h] = (next - most[h]) * factor > SLACK;
            shrink[h] = rises[h] ? fast_exp2((most[h] - next) * factor) : 1.0f;
            if (rises[h]) most[h] = next;
            sum[h] *= shrink[h];
            shift[h] = shift_of(h);
        }
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            int h = i / 2 % 2;
            scores[i] = fast_exp2(HAS_SCORE ? (scores[i] + shift[h]) * factor
                                            : fmaf(scores[i], factor, shift[h]));
            fresh[h][i % 2] += scores[i];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) sum[h] += fresh[h][0] + fresh[h][1];
        return !__any_sync(ALL_LANES, rises[0] || rises[1]);
    }

    // The sums of all weights of the rows: NaN of a scale that is not finite, which `factor` hides.
    __device__ __forceinline__ void close(float scale) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 1);
            sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], 2);
            if (sum[h] != 0.0f) sum[h] = fmaf(scale, 0.0f, sum[h]);
        }
    }
    // What sums of values are multiplied by, and the logarithm of the sum of exponentials.
    __device__ __forceinline__ float share(int h) const {
        return sum[h] == 0.0f ? 0.0f : 1.0f / sum[h];
    }
    __device__ __forceinline__ float logarithm(int h, float log2_sum) const {
        if (sum[h] == 0.0f) return minus_infinity();
        if (HAS_SCORE) return most[h] + LN_2 * log2_sum;
        return LN_2 * (log2_sum - shift_of(h));
    }
};

__device__ __forceinline__ void pack_weights(Weights& to, const float (&weights)[SCORES]) {
#pragma unroll
    for (int i = 0; i < SCORES; i += 2)
        to[i / 8][i % 8 / 2] = pack<InputT>(weights[i], weights[i + 1]);
}
