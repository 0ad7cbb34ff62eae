// out[i,l,r,s] = Finish(sum_q left[i,l,r,q] * right[i,l,s,q]), one CTA a tile of rows r and columns
// s of one block i and lane l: a Kronecker-sparse factor forward, its gradient by x and, with the
// depth in splits whose sums split_k_sum.cuh adds up, by the weight. For every GPU since sm_80 and
// any strides.
//
// Floors of a factor (a,b,c,d) on an H200: (a*d*(b+c)*batch + a*b*c*d) * itemsize bytes over
// 4.3 TB/s; 2*a*b*c*d*batch operations over 770 TFLOP/s in half types, 138 in 3xTF32, 415 in TF32.
// Operations decide from b*c / (b+c) = 64 (3xTF32) or 179 (half types) on.
//
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT      storage of left and right, arithmetic (float), storage of out
//   TILE_ROWS, TILE_COLUMNS    128 x 128, 128 x 64 or 64 x 64
//   STAGES, MIN_BLOCKS         stages under way, CTAs a multiprocessor holds
//   PRODUCTS                   of one multiplication: 1, or 3 for fp32 by 3xTF32
//   ACCESS_LEFT, ACCESS_RIGHT  a value of Access (portable/operand.cuh)
//   VECTORS, SCALARS, Finish   the epilogue
//   PARAMETER_BYTES            what lowering makes of Parameters
#pragma once

// 3xTF32 sums of this depth are added up in out, which is fp32 then: a chain of 800 additions is
// off by 5e-7, chains of 128 are by 2.6e-7.
constexpr int PART = 1024;
constexpr bool PARTS = PRODUCTS == 3;

#include "common/parameters.cuh"
#include "kronecker_sparse/portable/store.cuh"

struct View {
    i64 block_stride, lane_stride, line_stride, depth_stride;
};

// Written at each launch.
struct Pointers {
    const InputT* left;
    const InputT* right;
    OutputT* out;
};

struct Fixed {
    View left_view, right_view;
    i64 out_block_stride, out_lane_stride, out_row_stride, out_column_stride, out_split_stride;
    i64 rows, columns, depth, split_depth;
    u32 lanes, column_tiles, row_tiles;
    u32 columns_of_tiles;  // column_tiles * lanes * blocks
    u32 rows_of_tiles;     // row_tiles * splits
    u32 rows_a_slab;       // of tiles, in one blockIdx.y
    u32 left_depth_first, right_depth_first;
    u32 out_along_rows;    // whether rows lie closer together in out than columns
    u32 out_vectors;       // whether out takes aligned 16-byte stores along its closer lines
};

// Laid out by kernlib/families/kronecker_sparse/lowering/portable.py.
struct Parameters : Pointers, VectorPointers<VECTORS>, Scalars<SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

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

    __device__ __forceinline__ Lines lines(const InputT* data, const View& view, i64 first,
                                           i64 count, i64 depth, bool depth_first) const {
        return {data + block * view.block_stride + lane * view.lane_stride +
                    first * view.line_stride + depth * view.depth_stride,
                view.line_stride, view.depth_stride, int(min(count - first, i64(128))),
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
                 place.lines(p.left, p.left_view, place.row, p.rows, begin, p.left_depth_first),
                 place.lines(p.right, p.right_view, place.column, p.columns, begin,
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
