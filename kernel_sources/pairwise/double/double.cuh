// Products of a kernel matrix in double with up to WIDTH columns, and its row sums: tiles of sums
// (double/tile.cuh) become values where they are, and tensor cores multiply those by v, as a
// product's results lie as its left operand does, but for the order of the n that it sums over.
// A block walks over the tiles of its TILE rows, and leaves partial results as reduce/reduce.cuh.
//
// Squared differences are |a|^2 + |b|^2 - 2 a b of packed points where all of a tile's are NEAR or
// more of |a|^2 + |b|^2, 5 bits of 53 lost. Tiles with nearer pairs, or what is not finite, are
// summed once more as differences, from the points that were given: equal points are at 0.
//
// Floors on an H100 (132 SM, 1.75 GHz): 7.7 ms of tensor cores for 60000^2 pairs of 64 features,
// and 1 ms for v; of FP64 lanes, 64 a clock and SM, about 20 operations a Gaussian, 4.9 ms. By
// differences 2 operations a pair and feature: 31 ms.
//
// Facts and structs Fixed and PackedStrides: class Double of
// kernlib/families/pairwise/kernels/double.py. Finish is Outer and Epilogue of one sum; its
// constructor reads hyperparameters.
#pragma once

#include "pairwise/double/tile.cuh"
#include "pairwise/reduce/parameters.cuh"

using Inner = Config::Inner;  // a struct of terms.cuh
using Term = Config::Term;    // Difference or Dot of it
constexpr bool PRODUCTS = Config::PRODUCTS;  // sums of packed points by tensor cores; else of terms
constexpr bool CENTRED = Config::CENTRED;    // products that make squared differences
constexpr bool SUM = Config::SUM;            // v is all ones, and not read
constexpr bool REGULARIZED = Config::REGULARIZED;  // whether the regularization is given

constexpr int WIDTH = 8;
constexpr int STEP = Inner::ZERO_ADDS_NOTHING ? Inner::UNROLL_K : 1;
// Blocks of a multiprocessor: of fewer than 228 KB of shared memory two at most. Three leave 168
// registers a thread, of which 160 bytes spill where powers are taken of squares that tensor cores
// made; eight powers side by side are enough for two.
constexpr bool MANY_REGISTERS = Inner::BY_LOGARITHM || (Config::POWERS && CENTRED);
#if __CUDA_ARCH__ >= 900
constexpr int RESIDENT = MANY_REGISTERS ? 2 : 3;
#else
constexpr int RESIDENT = 2;
#endif
constexpr double NEAR = 1.0 / 32;

template <bool PRODUCTS>
struct PackedPoints {
    const double* packed_a;
    const double* packed_b;
    const double* a_norms;
    const double* b_norms;
};
template <>
struct PackedPoints<false> {};

struct Launch : PackedPoints<PRODUCTS>, Parameters, PackedStrides {};
static_assert(sizeof(Launch) == Config::PARAMETER_BYTES, "as the host lays it out");

// A term with its operation and another inner stage.
template <class Term, class Inner>
struct WithInner;
template <template <class> class Operation, class Former, class Inner>
struct WithInner<Operation<Former>, Inner> {
    using Type = Operation<Inner>;
};

__device__ __forceinline__ Points points_of(const double* data, const View& view, i64 l, i64 first,
                                            i64 count) {
    return {data + l * view.batch_stride + first * view.row_stride, view.row_stride,
            view.column_stride, int(min(count - first, i64(TILE)))};
}

// Makes squared distances of products, and answers whether a pair of the `columns` that exist is
// too near for that, or not finite.
__device__ __forceinline__ bool make_squares(Sums& sums, const double* a_norms,
                                             const double* b_norms, const Place& place,
                                             int columns) {
    bool near = false;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
        auto right = load_vector<double, 2>(b_norms + place.column_of(j));
#pragma unroll
        for (int i = 0; i < ROWS * 4; ++i) {
            int half = i / 2 % 2, e = i % 2;
            double both = a_norms[place.row_of(i / 4, half)] + right.element[e];
            double& sum = sums[i / 4][j][i % 4];
            sum = fma(-2.0, sum, both);
            near |= place.column_of(j) + e < columns && !(sum > NEAR * both);
        }
    }
    return near;
}

// The sums of a tile's terms, from the points that were given.
template <class Stage>
__device__ __forceinline__ void sum_terms(Stage, Sums& sums, double* stages, int chunks,
                                          const GivenTiles& tiles, const Place& place,
                                          const Numbers& numbers) {
    using Summed = typename WithInner<Term, Stage>::Type;
    sum_tile(sums, stages, chunks, tiles,
             Terms<Summed, STEP, PRODUCTS>{place, numbers, tiles.features});
}
// A p on the device is looked at once a tile: in each term that took 10 operations beside 43, and
// branches, which part powers that go through the pipe side by side.
__device__ __forceinline__ void sum_terms(PowerOnDevice, Sums& sums, double* stages, int chunks,
                                          const GivenTiles& tiles, const Place& place,
                                          const Numbers& numbers) {
    if (numbers.p == 0.0)
        sum_terms(Power0(), sums, stages, chunks, tiles, place, numbers);
    else if (numbers.p == 1.0)
        sum_terms(Abs(), sums, stages, chunks, tiles, place, numbers);
    else if (numbers.p == 2.0)
        sum_terms(Square(), sums, stages, chunks, tiles, place, numbers);
    else if (numbers.p == infinity(numbers.p))
        sum_terms(PowerInfinity(), sums, stages, chunks, tiles, place, numbers);
    else
        sum_terms(Power(), sums, stages, chunks, tiles, place, numbers);
}

// The sums of packed points, of which `columns` exist; whether terms must be summed in their place.
template <class Launch>
__device__ __forceinline__ bool sum_products(Sums& sums, double* stages, int chunks,
                                             const Launch& launch, const Part& part,
                                             const Place& place, i64 l, i64 n0, int columns) {
    PackedTiles tiles = {launch.packed_a + l * launch.a_stride + part.m0 * chunks * DEPTH,
                         launch.packed_b + l * launch.b_stride + n0 * chunks * DEPTH};
    sum_tile(sums, stages, chunks, tiles, Products{place});
    bool near = false;
    const double* a_norms = launch.a_norms + l * launch.a_norms_stride + part.m0;
    const double* b_norms = launch.b_norms + l * launch.b_norms_stride + n0;
    if (CENTRED) near = make_squares(sums, a_norms, b_norms, place, columns);
    return CENTRED && __syncthreads_or(near);
}

// v[l,n,c] where both exist, else 0.
__device__ __forceinline__ double weight_of(const Parameters& parameters, i64 l, i64 n, int c) {
    if (c >= parameters.columns || n >= parameters.n) return 0.0;
    if (SUM) return 1.0;
    const View& view = parameters.v_view;
    return parameters.v[l * view.batch_stride + n * view.row_stride + c * view.column_stride];
}

// Row sums of a warp's rows and columns, for the columns 2 t and 2 t + 1 of v. They wait in shared
// memory, where they cost no register, with what the last addition rounded off.
struct Totals {
    static constexpr int COUNT = ROWS * 4;
    double* total;
    double* rest;

    __device__ __forceinline__ explicit Totals(double* shared)
        : total(shared + threadIdx.x), rest(total + COUNT * THREADS) {
#pragma unroll
        for (int i = 0; i < 2 * COUNT; ++i) total[i * THREADS] = 0.0;
    }

    // Takes the values of a tile of which `columns` exist: of a column that does not no value is
    // added, as an epilogue makes anything of a zero. Sums move up to where one copy of the code
    // finds them: 32 of an exponential need registers of a third more, and 70 KB.
    __device__ __forceinline__ void take(Sums& sums, const Parameters& parameters,
                                         const Finish& finish, const Place& place, i64 l, i64 n0,
                                         int columns) const {
        double run[ROWS][4];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) run[i / 4][i % 4] = rest[i * THREADS];
#pragma unroll 1
        for (int j = 0; j < COLUMNS; ++j) {
            double values[4], weights[2];
            int column = place.column_of(j);
#pragma unroll
            for (int e = 0; e < 2; ++e)
                weights[e] = weight_of(parameters, l, n0 + column + e, place.g);
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    double value = finish(sums[i][0][e % 2 * 2 + e / 2]);
                    values[e] = column + e / 2 < columns ? value : 0.0;
                }
                multiply_fragments(run[i], values, weights);
            }
#pragma unroll
            for (int i = 0; i < ROWS * (COLUMNS - 1) * 4; ++i) {
                int at = i / 4 % (COLUMNS - 1), row = i / 4 / (COLUMNS - 1);
                sums[row][at][i % 4] = sums[row][at + 1][i % 4];
            }
        }
        // A chain of n equal terms would be off by 2.8e-17 n.
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            total[i * THREADS] = add_chain(total[i * THREADS], run[i / 4][i % 4]);
            rest[i * THREADS] = run[i / 4][i % 4];
        }
    }

    // Adds those of the two warps of a row, and writes them.
    __device__ __forceinline__ void store(double* shared, const Parameters& parameters,
                                          const Part& part, const Place& place, i64 l) const {
        constexpr int ALL = TILE * WIDTH;
        double* own = shared + (place.column > 0 ? ALL : 0) + 2 * place.t;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            own[place.row_of(i / 4, i / 2 % 2) * WIDTH + i % 2] = total[i * THREADS];
        __syncthreads();
#pragma unroll 1
        for (int i = threadIdx.x; i < ALL; i += THREADS) {
            int c = i % WIDTH;
            i64 m = part.m0 + i / WIDTH, n = m + parameters.diagonal;
            if (m >= parameters.m || c >= parameters.columns) continue;
            double sum = shared[i] + shared[i + ALL];
            if (REGULARIZED && n >= part.first && n < part.last)
                sum = fma(ScalarReader<Parameters>{parameters, l}(REGULARIZATION),
                          weight_of(parameters, l, n, c), sum);
            i64 row = (part.split * parameters.batch + l) * parameters.m + m;
            parameters.out[row * parameters.out_columns + c] = sum;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
pairwise_double_main(const __grid_constant__ Launch launch) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Parameters& parameters = launch;
    double* stages = reinterpret_cast<double*>(shared);
    int features = parameters.k, chunks = (features + DEPTH - 1) / DEPTH;
    Part part(parameters, TILE);
    Place place;
#pragma unroll 1
    for (i64 l = blockIdx.y; l < parameters.batch; l += gridDim.y) {
        ReadScalar read{parameters, l};
        Finish finish(read);
        Numbers numbers = {read(INNER_P), read(INNER_SCALE)};
        auto a = points_of(parameters.a, parameters.a_view, l, part.m0, parameters.m);
        Totals totals(stages + STAGES * STAGE);
#pragma unroll 1
        for (i64 n0 = part.first; n0 < part.last; n0 += TILE) {
            Sums sums;
            auto b = points_of(parameters.b, parameters.b_view, l, n0, part.last);
            bool by_terms = true;
            if constexpr (PRODUCTS)
                by_terms = sum_products(sums, stages, chunks, launch, part, place, l, n0, b.count);
            if (by_terms)
                sum_terms(Inner(), sums, stages, chunks, GivenTiles{a, b, features}, place,
                          numbers);
            totals.take(sums, parameters, finish, place, l, n0, b.count);
        }
        totals.store(stages, parameters, part, place, l);
    }
}
