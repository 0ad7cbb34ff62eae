// Lines as points/points.cuh reads them beside their points: features, which have lost the centre,
// as words that tensor cores multiply what pairs are worth by (product/columns.cuh), and numbers.
//
// A block has a GROUP of n and 8 features, or, behind those of all features, the numbers. Reads b
// once and writes 4 bytes for each number: 12 N K bytes over 3.4 TB/s on an H200.
#pragma once

#include "pairwise/points/parameters.cuh"
#include "pairwise/product/columns.cuh"

__device__ __forceinline__ void pack_features(const PointsLaunch& p, i64 l, int group, int first) {
    i64 n = i64(group) * GROUP + threadIdx.x;
    const InputT* from = p.b + l * p.b_view.batch_stride + n * p.b_view.row_stride;
    const float* centre = p.centre + l * p.centre_stride;
    Byte* stages = p.packed_lines + l * p.lines_stride;
    pack_columns<LINES_BYTES>(stages, p.gate, group, first, [&](int c) {
        int k = first + c;
        if (n < p.n && k < p.k) {
            float x = convert<float>(from[k * p.b_view.column_stride]);
            return DIFFERENCE ? x - centre[k] : x;
        }
        return COUNTED && n < p.n && k == p.k ? 1.0f : 0.0f;
    });
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
