// out[o, c, (q1 .. qN)] = Finish(sum x[o, c, (p1 .. pN)] * F1[p1, q1] * .. * FN[pN, qN]): a run of
// neighbouring factors of a Kronecker product, applied to a tile of COLUMNS columns c that stays in
// shared memory between the first factor and the last. One column is a whole row of x, or what one
// of the elements behind the run's own takes part in. For every GPU since sm_80 and any strides.
//
// Floors on an H200: (bytes of x and of out) over 4.3 TB/s; 2 * sum_i features_i * columns_i
// operations a column over 94 TFLOP/s in 3xTF32, 282 in TF32, 61 in double. Of every element a mode
// reads 4 bytes of shared memory and writes 4, at 33 TB/s.
//
// The generated source defines before it includes this file:
//   SourceT, InputT, OutputT         storage of x, of factors and vectors, and of the result
//   AccT                             arithmetic: float or, with DOUBLE defined, double
//   PRODUCTS                         of one multiplication in float: 1, or 3 for fp32 by 3xTF32
//   WARPS, MIN_BLOCKS                of a CTA, and CTAs a multiprocessor holds
//   COLUMNS, COLUMNS_LAST            of a tile, and whether they are its last dimension
//   IN_FEATURES, OUT_FEATURES        of a column
//   TILE                             elements of shared memory that the tile takes
//   FACTORS, ROWS[], WIDTHS[]        of all factors
//   MODES(with)                      with(L, P, Q, R, FIRST, PARTS, LAST, AT) of each mode in its
//                                    order: Mode's arguments, and where its matrix lies
//   VECTORS, SCALARS, Finish         the epilogue
//   PARAMETER_BYTES                  what lowering makes of Parameters
#pragma once

constexpr int THREADS = WARPS * 32;

#include "common/async_copy.cuh"
#include "common/parameters.cuh"
#include "kronecker_product/modes/multiply.cuh"

struct Matrix {
    i64 row_stride, column_stride, batch_stride;
};

// Written at each launch.
struct Pointers {
    const SourceT* x;
    OutputT* out;
    const InputT* factors[FACTORS];
};

struct Side {
    i64 batch_stride, outer_stride, column_stride, feature_stride;
};

struct Fixed {
    Side in, out_side;
    Matrix matrices[FACTORS];
    i64 columns, tiles;    // columns of one outer index; tiles of all of one batch
    i64 tiles_of_columns;  // of one outer index
    // Of the output feature: from one outer index, column (divided first) and own feature on.
    i64 feature_outer, feature_column, feature_own, feature_divisor;
    u32 aligned;           // whether x takes aligned 16-byte copies along the tile's last dimension
    u32 columns_first;     // whether columns lie closer together in x than features
};

// Laid out by kernlib/families/kronecker_product/lowering/modes.py.
struct Parameters : Pointers, VectorPointers<VECTORS>, Scalars<SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

// The matrix of a mode, column by column: the product of its factors' entries, zeros around it.
template <class M>
__device__ __forceinline__ void stage_matrix(AccT* matrix, const Parameters& p) {
    for (int index = threadIdx.x; index < M::MATRIX; index += THREADS) {
        int row = index % M::DEPTH, column = index / M::DEPTH;
        AccT value = 0;
        if (row < M::P && column < M::Q) {
            value = 1;
#pragma unroll
            for (int part = M::FIRST + M::PARTS - 1; part >= M::FIRST; --part) {
                const Matrix& m = p.matrices[part];
                value *= convert<AccT>(p.factors[part][blockIdx.y * m.batch_stride +
                                                       row % ROWS[part] * m.row_stride +
                                                       column % WIDTHS[part] * m.column_stride]);
                row /= ROWS[part];
                column /= WIDTHS[part];
            }
        }
        matrix[place(index)] = value;
    }
}

// What a tile is of.
struct Tile {
    i64 outer, column;
    int columns;  // that exist

    __device__ __forceinline__ Tile(const Parameters& p, i64 index) {
        outer = index / p.tiles_of_columns;
        column = index % p.tiles_of_columns * COLUMNS;
        columns = int(min(p.columns - column, i64(COLUMNS)));
    }
    template <class T>
    __device__ __forceinline__ T* of(T* data, const Side& side) const {
        return data + blockIdx.y * side.batch_stride + outer * side.outer_stride +
               column * side.column_stride;
    }
};

constexpr int INPUTS = COLUMNS * IN_FEATURES;
constexpr int CHUNK = 16 / sizeof(SourceT);
// Of the tile's last dimension, in which 16-byte copies run.
constexpr int LAST = COLUMNS_LAST ? COLUMNS : IN_FEATURES;

// Column and feature of an element of the tile that is read.
__device__ __forceinline__ void locate(int index, int& column, int& feature) {
    column = COLUMNS_LAST ? index % COLUMNS : index / IN_FEATURES;
    feature = COLUMNS_LAST ? index / COLUMNS : index % IN_FEATURES;
}

__device__ __forceinline__ void load_tile(AccT* tile, const Parameters& p, const Tile& at) {
    const SourceT* x = at.of(p.x, p.in);
    if (LAST % CHUNK == 0 && p.aligned) {
#pragma unroll 4
        for (int index = threadIdx.x * CHUNK; index < INPUTS; index += THREADS * CHUNK) {
            int column, feature;
            locate(index, column, feature);
            int exist = COLUMNS_LAST ? max(0, min(CHUNK, at.columns - column))
                                     : column < at.columns ? CHUNK : 0;
            const SourceT* from = x + column * p.in.column_stride + feature * p.in.feature_stride;
            if constexpr (sizeof(SourceT) == sizeof(AccT)) {
                copy_async<16>(tile + place(index), exist ? from : p.x,
                               exist * int(sizeof(SourceT)));
            } else {
                Vector<SourceT, CHUNK> values = {};
                if (exist == CHUNK) values = load_vector<SourceT, CHUNK>(from);
                else
#pragma unroll
                    for (int e = 0; e < CHUNK; ++e)
                        if (e < exist) values.element[e] = from[e];
#pragma unroll
                for (int e = 0; e < CHUNK; ++e)
                    tile[place(index + e)] = convert<AccT>(values.element[e]);
            }
        }
        wait_for_copies();
        return;
    }
    for (int index = threadIdx.x; index < INPUTS; index += THREADS) {
        int column, feature;
        if (p.columns_first) {
            column = index % COLUMNS;
            feature = index / COLUMNS;
        } else {
            column = index / IN_FEATURES;
            feature = index % IN_FEATURES;
        }
        AccT value = 0;
        if (column < at.columns)
            value = convert<AccT>(x[column * p.in.column_stride + feature * p.in.feature_stride]);
        tile[place(COLUMNS_LAST ? feature * COLUMNS + column : column * IN_FEATURES + feature)] =
            value;
    }
}

// The sums in the place of the tile.
template <class M>
__device__ __forceinline__ void put_back(AccT* tile, const Sums<M>& sums, const Warp<M>& warp,
                                         int begin) {
#pragma unroll
    for (int i = 0; i < M::ROWS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int slice = warp.slice(begin + i, half);
            if (slice >= M::SLICES) continue;
            int base = slice / M::R * (M::Q * M::R) + slice % M::R;
#pragma unroll
            for (int j = 0; j < M::WARP_COLUMNS; ++j) {
                int column = warp.column(j);
                const AccT* value = sums.value[i][j] + 2 * half;
                if constexpr (M::R == 1 && M::Q % 2 == 0) {
                    if (column < M::Q)
                        store_vector(tile + place(base + column),
                                     Vector<AccT, 2>{value[0], value[1]});
                } else {
#pragma unroll
                    for (int next = 0; next < 2; ++next)
                        if (column + next < M::Q)
                            tile[place(base + (column + next) * M::R)] = value[next];
                }
            }
        }
    }
}

// The sums of the last mode, finished, to device memory.
template <class M>
__device__ __forceinline__ void store(const Parameters& p, const Tile& at, const Sums<M>& sums,
                                      const Finish& finish, const Warp<M>& warp, int begin) {
    OutputT* out = at.of(p.out, p.out_side);
#pragma unroll
    for (int i = 0; i < M::ROWS; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int slice = warp.slice(begin + i, half);
            if (slice >= M::SLICES) continue;
            // The slice is of a column and of what stands before and behind the mode's own index.
            constexpr int BEHIND = COLUMNS_LAST ? M::R / COLUMNS : M::R;
            constexpr int BEFORE = COLUMNS_LAST ? M::L : M::L / COLUMNS;
            int left = slice / M::R, right = slice % M::R;
            int column = COLUMNS_LAST ? right % COLUMNS : left / BEFORE;
            int before = COLUMNS_LAST ? left : left % BEFORE;
            int behind = COLUMNS_LAST ? right / COLUMNS : right;
            if (column >= at.columns) continue;
            i64 first = 0;
            if (EPILOGUE)
                first = at.outer * p.feature_outer +
                        (at.column + column) / p.feature_divisor * p.feature_column;
#pragma unroll
            for (int j = 0; j < M::WARP_COLUMNS; ++j) {
#pragma unroll
                for (int next = 0; next < 2; ++next) {
                    int q = warp.column(j) + next;
                    if (q >= M::Q) continue;
                    int feature = (before * M::Q + q) * BEHIND + behind;
                    AccT value = sums.value[i][j][2 * half + next];
                    if (EPILOGUE) value = finish(value, first + feature * p.feature_own);
                    out[column * p.out_side.column_stride + feature * p.out_side.feature_stride] =
                        convert<OutputT>(value);
                }
            }
        }
    }
}

template <class M>
__device__ __forceinline__ void apply(AccT* tile, const AccT* matrix, const Parameters& p,
                                      const Tile& at, const Finish& finish) {
    Warp<M> warp;
    Factors<M> factors;
    factors.read(matrix, warp);
#pragma unroll 1
    for (int begin = 0; begin < M::WARP_ROWS; begin += M::ROWS) {
        Sums<M> sums = {};
        multiply<M>(sums, tile, matrix, factors, warp, begin);
        if constexpr (M::LAST) {
            store<M>(p, at, sums, finish, warp, begin);
        } else {
            if (M::AT_ONCE) __syncthreads();
            else __syncwarp();
            put_back<M>(tile, sums, warp, begin);
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
kronecker_product_modes(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) unsigned char shared[];
    AccT* tile = reinterpret_cast<AccT*>(shared);
    AccT* matrices = tile + TILE;
#define STAGE(L, P, Q, R, FIRST, PARTS, LAST, AT) \
    stage_matrix<Mode<L, P, Q, R, FIRST, PARTS, LAST>>(matrices + AT, p);
    MODES(STAGE)
    Finish finish(Read<Parameters>{p});
    for (i64 index = blockIdx.x; index < p.tiles; index += gridDim.x) {
        Tile at(p, index);
        load_tile(tile, p, at);
        __syncthreads();
#define APPLY(L, P, Q, R, FIRST, PARTS, LAST, AT) \
    apply<Mode<L, P, Q, R, FIRST, PARTS, LAST>>(tile, matrices + AT, p, at, finish);
        MODES(APPLY)
    }
}
