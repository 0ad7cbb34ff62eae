// Lines as points/points.cuh reads them beside their points: features as words that tensor cores
// multiply what pairs are worth by, n along the depth, and numbers. Features have lost the centre,
// and those of a GROUP of n are scaled by the power of two that takes the largest of them to 2^13,
// so that low words are exact to 2^-38 of it. One that is not finite closes the gate.
//
// A block has a GROUP of n and 8 features, or, behind those of all features, the numbers. Reads b
// once and writes 4 bytes for each number: 12 N K bytes over 3.4 TB/s on an H200.
#pragma once

#include "pairwise/points/parameters.cuh"

constexpr int THREADS = GROUP, WARPS = THREADS / 32, EIGHT = 8;

// The power of two that takes `largest` to 2^13, and the one that takes it back.
struct FeatureScale {
    float there, back;
    __device__ __forceinline__ explicit FeatureScale(float largest) {
        int exponent = max(13 - ((__float_as_int(largest) >> 23) - 127), -113);
        exponent = min(exponent, 126);
        there = __int_as_float((exponent + 127) << 23);
        back = __int_as_float((127 - exponent) << 23);
    }
};

__device__ __forceinline__ void pack_features(const PointsLaunch& p, i64 l, int group, int first) {
    __shared__ float values[GROUP][EIGHT + 1];
    __shared__ float largest[WARPS][EIGHT];
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    i64 n = i64(group) * GROUP + thread;
    const InputT* from = p.b + l * p.b_view.batch_stride + n * p.b_view.row_stride;
    const float* centre = p.centre + l * p.centre_stride;
    float check = 0.0f;
#pragma unroll
    for (int c = 0; c < EIGHT; ++c) {
        float x = 0.0f;
        int k = first + c;
        if (n < p.n && k < p.k) {
            x = convert<float>(from[k * p.b_view.column_stride]);
            if (DIFFERENCE) x -= centre[k];
        } else if (COUNTED && n < p.n && k == p.k) {
            x = 1.0f;
        }
        check = fmaf(x, 0.0f, check);
        values[thread][c] = x;
        float most = fabsf(x);
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        if (lane == c) largest[warp][c] = most;
    }
    if (check != 0.0f) p.gate->closed = CLOSED;
    __syncthreads();
    int column = thread % EIGHT, eighth = thread / EIGHT;  // of 8 n
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = fmaxf(most, largest[i][column]);
    FeatureScale scale(most);
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
    Byte* to = p.packed_lines + l * p.lines_stride + i64(tile) * LINES_BYTES;
    Byte* words = to + place / 2 * V_STEP + place % 2 * (WIDTH * 16) +
                           (first + column) * 16;
    store_vector(reinterpret_cast<u32*>(words), high);
    store_vector(reinterpret_cast<u32*>(words + V_WORDS), low);
    if (place == 0) {
        float* scales = reinterpret_cast<float*>(to + TILE_N / STEP * V_STEP);
        scales[first + column] = scale.back;
    }
}

__device__ __forceinline__ void pack_numbers(const PointsLaunch& p, i64 l, int group) {
    i64 n = i64(group) * GROUP + threadIdx.x;
    float numbers[NUMBERS];
    read_line(numbers, p, l, n);
    Byte* to = p.packed_lines + l * p.lines_stride + n / TILE_N * LINES_BYTES;
    float* line = reinterpret_cast<float*>(to + FEATURE_BYTES) + n % TILE_N * NUMBERS;
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) line[i] = numbers[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_points_pack(const __grid_constant__ PointsLaunch p) {
    int groups = int((p.n + GROUP - 1) / GROUP);
    int group = int(blockIdx.x % groups), part = int(blockIdx.x / groups);
    if (part < (WANTS_POINTS ? WIDTH / EIGHT : 0)) {
        pack_features(p, blockIdx.y, group, part * EIGHT);
    } else {
        pack_numbers(p, blockIdx.y, group);
    }
}
