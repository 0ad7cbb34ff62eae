// v as product/product.cuh reads it, and points of few features in lines. Columns of a GROUP of n
// are scaled by the power of two that takes the largest of them to 2^13, so that low words are
// exact to 2^-38 of it. A number that is not finite closes the gate.
//
// A block has a GROUP of n and 8 columns of v, or, behind those of all columns, features of b.
// Reads v once and writes 4 bytes for each number: 12 N C bytes over 3.4 TB/s on an H200.
//
// The generated source defines, beside what reduce/parameters.cuh needs:
//   WIDTH, V_COPIES    columns of v as padded; 2 for high and low words, else 1
//   FEATURES           of points that sums on lanes read; 0 for sums of words
#pragma once

#include "pairwise/product/parameters.cuh"

constexpr int THREADS = GROUP, WARPS = THREADS / 32, EIGHT = 8;

// Laid out by kernlib/families/pairwise/lowering/product.py.
struct PackLaunch {
    // written at each launch
    const InputT* b;
    const InputT* v;
    Gate* gate;
    unsigned char* packed_v;
    float* lines;
    // fixed by the plan
    View b_view, v_view;
    i64 n, v_stride, lines_stride;      // of batch entries: bytes, numbers
    int groups, columns;                // GROUPs of n; columns that exist
};
static_assert(sizeof(PackLaunch) == PARAMETER_BYTES, "as lowering lays it out");

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

__device__ __forceinline__ void pack_columns(const PackLaunch& p, i64 l, int group, int first) {
    __shared__ float values[GROUP][EIGHT + 1];
    __shared__ float largest[WARPS][EIGHT];
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    i64 n = i64(group) * GROUP + thread;
    const InputT* from = p.v + l * p.v_view.batch_stride + n * p.v_view.row_stride;
    float check = 0.0f;
#pragma unroll
    for (int c = 0; c < EIGHT; ++c) {
        float x = 0.0f;
        if (n < p.n && first + c < p.columns)
            x = convert<float>(from[(first + c) * p.v_view.column_stride]);
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
    unsigned char* to = p.packed_v + l * p.v_stride + i64(tile) * V_BYTES;
    unsigned char* words = to + place / 2 * V_STEP + place % 2 * (WIDTH * 16) +
                           (first + column) * 16;
    store_vector(reinterpret_cast<u32*>(words), high);
    if (V_COPIES == 2) store_vector(reinterpret_cast<u32*>(words + V_WORDS), low);
    if (place == 0) {
        float* scales = reinterpret_cast<float*>(to + TILE_N / STEP * V_STEP);
        scales[first + column] = scale.back;
    }
}

// All features of a group's points, zero past the last one.
__device__ __forceinline__ void pack_lines(const PackLaunch& p, i64 l, int group) {
    i64 n = i64(group) * GROUP + threadIdx.x;
    const InputT* from = p.b + l * p.b_view.batch_stride + n * p.b_view.row_stride;
    float* to = p.lines + l * p.lines_stride + n / TILE_N * (FEATURES * TILE_N) + n % TILE_N;
#pragma unroll
    for (int k = 0; k < FEATURES; ++k)
        to[k * TILE_N] = n < p.n ? convert<float>(from[k * p.b_view.column_stride]) : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
pairwise_product_pack(const __grid_constant__ PackLaunch p) {
    int group = int(blockIdx.x % p.groups), part = int(blockIdx.x / p.groups);
    if (part < WIDTH / EIGHT) {
        pack_columns(p, blockIdx.y, group, part * EIGHT);
    } else {
        pack_lines(p, blockIdx.y, group);
    }
}
