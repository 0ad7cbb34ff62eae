// v as product/product.cuh reads it (product/columns.cuh), and points of few features in lines.
//
// A block has a GROUP of n and 8 columns of v, or, behind those of all columns, features of b.
// Reads v once and writes 4 bytes for each number: 12 N C bytes over 3.4 TB/s on an H200.
//
// Facts and struct Fixed: class ProductPack of kernlib/families/pairwise/kernels/product.py.
#pragma once

#include "pairwise/product/columns.cuh"
#include "pairwise/view.cuh"

using InputT = Config::InputT;              // storage
constexpr int FEATURES = Config::FEATURES;  // of points that sums on lanes read; 0 for others

struct Operands {
    const InputT* b;
    const InputT* v;
    Gate* gate;
    unsigned char* packed_v;
    float* lines;
};

struct PackLaunch : Operands, Fixed {};
static_assert(sizeof(PackLaunch) == Config::PARAMETER_BYTES, "as the host lays it out");

__device__ __forceinline__ void pack_values(const PackLaunch& p, i64 l, int group, int first) {
    i64 n = i64(group) * GROUP + threadIdx.x;
    const InputT* from = p.v + l * p.v_view.batch_stride + n * p.v_view.row_stride;
    unsigned char* stages = p.packed_v + l * p.v_stride;
    pack_columns<V_BYTES>(stages, p.gate, group, first, [&](int c) {
        bool exists = n < p.n && first + c < p.columns;
        return exists ? convert<float>(from[(first + c) * p.v_view.column_stride]) : 0.0f;
    });
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
        pack_values(p, blockIdx.y, group, part * EIGHT);
    } else {
        pack_lines(p, blockIdx.y, group);
    }
}
