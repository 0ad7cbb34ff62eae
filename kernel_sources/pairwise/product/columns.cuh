// Columns of a GROUP of n as words of fp16 along n, which tensor cores multiply: a stage of them is
// as product/parameters.cuh says. They are scaled by the power of two that takes the largest of
// them to 2^13, so that low words are exact to 2^-38 of it.
#pragma once

#include "pairwise/product/parameters.cuh"

constexpr int THREADS = GROUP, WARPS = THREADS / 32, EIGHT = 8;

// The power of two that takes `largest` to 2^13, and the one that takes it back.
struct ColumnScale {
    float there, back;
    __device__ __forceinline__ explicit ColumnScale(float largest) {
        int exponent = max(13 - ((__float_as_int(largest) >> 23) - 127), -113);
        exponent = min(exponent, 126);
        there = __int_as_float((exponent + 127) << 23);
        back = __int_as_float((127 - exponent) << 23);
    }
};

// Packs columns `first` to first + 7 of a block's group into `stages`, STAGE_BYTES apart; value(c)
// is the number of column first + c at the thread's n. One that is not finite closes the gate.
template <int STAGE_BYTES, class Value>
__device__ __forceinline__ void pack_columns(unsigned char* stages, Gate* gate, int group,
                                             int first, const Value& value) {
    __shared__ float values[GROUP][EIGHT + 1];
    __shared__ float largest[WARPS][EIGHT];
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    float check = 0.0f;
#pragma unroll
    for (int c = 0; c < EIGHT; ++c) {
        float x = value(c);
        check = fmaf(x, 0.0f, check);
        values[thread][c] = x;
        float most = fabsf(x);
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        if (lane == c) largest[warp][c] = most;
    }
    if (check != 0.0f) gate->closed = CLOSED;
    __syncthreads();
    int column = thread % EIGHT, eighth = thread / EIGHT;  // of 8 n
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = fmaxf(most, largest[i][column]);
    ColumnScale scale(most);
    Vector<u32, 4> high, low;
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
        float x = values[eighth * 8 + e][column] * scale.there;
        float y = values[eighth * 8 + e + 1][column] * scale.there;
        half_t x_word = convert<half_t>(x), y_word = convert<half_t>(y);
        high.element[e / 2] = u32(x_word.bits) | u32(y_word.bits) << 16;
        low.element[e / 2] = pack<half_t>(x - convert<float>(x_word), y - convert<float>(y_word));
    }
    int tile = group * GROUP_TILES + eighth / 8, place = eighth % 8;  // of 8 n within a stage
    unsigned char* to = stages + i64(tile) * STAGE_BYTES;
    unsigned char* words = to + place / 2 * V_STEP + place % 2 * (WIDTH * 16) +
                           (first + column) * 16;
    store_vector(reinterpret_cast<u32*>(words), high);
    if (V_COPIES == 2) store_vector(reinterpret_cast<u32*>(words + V_WORDS), low);
    if (place == 0) {
        float* scales = reinterpret_cast<float*>(to + TILE_N / STEP * V_STEP);
        scales[first + column] = scale.back;
    }
}
