// out[i,l,r,s] = Finish(sum_q left[i,l,r,q] * right[i,l,s,q]), one CTA a tile of rows r and columns
// s of one block i and lane l: a Kronecker-sparse factor forward, its gradient by x and, with the
// depth in splits whose sums split_k_sum.cuh adds up, by the weight. For every GPU since sm_80 and
// any strides.
//
// Floors of a factor (a,b,c,d) on an H200: (a*d*(b+c)*batch + a*b*c*d) * itemsize bytes over
// 4.3 TB/s; 2*a*b*c*d*batch operations over 770 TFLOP/s in half types, 138 in 3xTF32, 415 in TF32.
// Operations decide from b*c / (b+c) = 64 (3xTF32) or 179 (half types) on.
//
// Facts and struct Fixed: class Portable of
// kernlib/families/kronecker_sparse/kernels/factor/portable.py.
#pragma once

#include "common/parameters.cuh"
#include "kronecker_sparse/portable/store.cuh"
#include "kronecker_sparse/strides.cuh"

struct Operands {
    const InputT* left;
    const InputT* right;
    OutputT* out;
};

struct Parameters : Operands, VectorPointers<Config::VECTORS>, Scalars<Config::SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// What a CTA computes. It waits in shared memory while the sums take the registers.
struct Place {
    i64 row, column;
    u32 block, lane, split;

    // Columns, lanes and blocks of the same rows are neighbours in time: they share what they read.
    // False past the last tile.
    __device__ __forceinline__ bool find(const Parameters& p) {
        u32 inside = blockIdx.x % p.columns_of_tiles;
        u32 down = blockIdx.x / p.columns_of_tiles + blockIdx.y * p.rows_a_slab;
        row = i64(down % p.row_tiles) * TILE_ROWS;
        split = down / p.row_tiles;
        column = i64(inside % p.column_tiles) * TILE_COLUMNS;
        lane = inside / p.column_tiles % p.lanes;
        block = inside / p.column_tiles / p.lanes;
        return down < p.rows_of_tiles;
    }

    __device__ __forceinline__ Lines lines(const InputT* data, const FactorStrides& strides,
                                           i64 first, i64 count, i64 depth,
                                           bool depth_first) const {
        return {data + block * strides.block + lane * strides.lane +
                    first * strides.line + depth * strides.depth,
                strides.line, strides.depth, int(min(count - first, i64(128))),
                depth_first};
    }

    __device__ __forceinline__ Target target(const Parameters& p, bool add, bool last) const {
        return {p.out + split * p.out_split_stride + block * p.out_block_stride +
                    lane * p.out_lane_stride + row * p.out_row_stride +
                    column * p.out_column_stride,
                p.out_row_stride, p.out_column_stride, int(min(p.rows - row, i64(TILE_ROWS))),
                int(min(p.columns - column, i64(TILE_COLUMNS))),
                (block * p.columns + column) * p.lanes + lane, p.lanes, add, last};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_sparse_portable(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ Place shared_place;

    Place place;
    if (!place.find(p)) return;
    if (threadIdx.x == 0) shared_place = place;
    __syncthreads();
    i64 begin = place.split * p.split_depth, end = min(begin + p.split_depth, p.depth);
    bool add = false;
#pragma unroll 1
    do {
        int terms = int(PARTS ? min(end - begin, i64(PART)) : end - begin);
        Sums sums = {};
        place = shared_place;
        sum_tile(sums, shared,
                 place.lines(p.left, p.left_strides, place.row, p.rows, begin, p.left_depth_first),
                 place.lines(p.right, p.right_strides, place.column, p.columns, begin,
                             p.right_depth_first),
                 terms);
        begin += terms;
        place = shared_place;
        store_tile(reinterpret_cast<float*>(shared), sums, place.target(p, add, begin >= end),
                   Finish(Read<Parameters>{p}), p.out_along_rows, p.out_vectors);
        add = true;
        if (PARTS) __syncthreads();
    } while (PARTS && begin < end);
}
