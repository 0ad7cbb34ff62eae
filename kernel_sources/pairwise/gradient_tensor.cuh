// out[l,o,q,k] (+)= factor sum_t (c[l,o,t] W[l,q,t]) Slope(x[l,q,k] - z[l,t,k]) on tensor cores.
//
// For one query the sum is a product: slopes (16 features x 16 points), which a warp makes in
// registers just where mma.sync wants them, times c W (16 points x 8 columns), which the CTA makes
// once a stage for all its features. Both factors are split into bfloat16 parts:
//
//   SIGN      slopes are 1, -1 or 0, exact in one part. Two products, by the parts of c W, whose
//             columns are coefficients; or, with SINGLE, one: the columns are the three parts of
//             the only coefficient times W, and nothing is lost.
//   else      two parts of each, three products: 2^-16 of each term at most.
//
// Floors on an H200, K = M = 10000 (points, queries), N = 768, 7.68e10 slopes:
//   issue     SIGN 2.5 slots a slope and 0.25 or 0.5 for the products: 6.3 to 7 ms
//             p = 1.5: 6 slots and 0.75: 16 ms; one special-function operation: 18.4 ms
//   products  2.3 ms each for 16 columns
//
// The generated source defines before it includes this file:
//   OutputT                storage of out; all else is float
//   SLOPE                  a struct of gradient_slopes.cuh, of differences
//   SINGLE                 one coefficient or none, and a sign
//   COLUMN_TILES           tiles of 8 coefficients: 1 or 2
//   QUERIES_A_WARP, FEATURE_TILES  of a warp, tiles of 16 features
//   WARPS_Q, WARPS_K       warps side by side along queries and along features
//   STEPS                  times 16 points of a stage
//   BLOCKS                 CTAs of a multiprocessor
#pragma once

using InputT = float;
using AccT = float;

#include "common/async_copy.cuh"
#include "pairwise/gradient_parameters.cuh"
#include "pairwise/gradient_fragments.cuh"

using Slope = SLOPE;

constexpr int THREADS = 32 * WARPS_Q * WARPS_K;
constexpr int QUERIES = QUERIES_A_WARP * WARPS_Q, FEATURES = 16 * FEATURE_TILES * WARPS_K;
constexpr int POINTS = 16 * STEPS;
constexpr int COLUMNS = SINGLE ? 1 : 8 * COLUMN_TILES;
constexpr int LINE = POINTS + 4;                    // of raw weights and coefficients
constexpr int Z_STAGE = FEATURES * POINTS;          // floats: [step][feature][16 points]
constexpr int W_STAGE = QUERIES * LINE, C_STAGE = COLUMNS * LINE;
constexpr int RAW = Z_STAGE + W_STAGE + C_STAGE;
constexpr int RAW_STAGES = 3;
constexpr int TERM_BYTES = SINGLE ? 8 * 16 : 16 * 32 * COLUMN_TILES;  // of a query and a step
constexpr int TERMS = QUERIES * STEPS * TERM_BYTES;
static_assert(!SINGLE || (Slope::SIGN && COLUMN_TILES == 1), "SINGLE is for signs");

using Sums = float[QUERIES_A_WARP][FEATURE_TILES][COLUMN_TILES][4];

// ROWS lines of 4-byte elements on their way to shared memory, a thread a few elements of a stage.
// Whichever of lines and points are neighbours in device memory, threads side by side read them.
template <int ROWS>
struct Elements {
    static constexpr int PER_THREAD = (ROWS * POINTS + THREADS - 1) / THREADS;
    const float* cursor;
    i64 stride, hop;                       // to the next stage, to the thread's next element
    int place, place_hop, t, t_hop, rows, row_hop;  // rows: that exist from the element's own on

    __device__ __forceinline__ Elements(const float* data, i64 line_stride, i64 point_stride,
                                        i64 exist) {
        bool along = point_stride == 1;
        int row = along ? threadIdx.x / POINTS : threadIdx.x % ROWS;
        t = along ? threadIdx.x % POINTS : threadIdx.x / ROWS;
        row_hop = along ? THREADS / POINTS : 0;
        t_hop = along ? 0 : THREADS / ROWS;
        rows = int(min(exist, i64(ROWS))) - row;
        cursor = data + row * line_stride + t * point_stride;
        stride = point_stride * POINTS;
        hop = row_hop * line_stride + t_hop * point_stride;
        place = row * LINE + t;
        place_hop = row_hop * LINE + t_hop;
    }

    __device__ __forceinline__ void begin(float* to, int left) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (ROWS * POINTS % THREADS && threadIdx.x + i * THREADS >= ROWS * POINTS) break;
            bool exists = t + i * t_hop < left && i * row_hop < rows;
            copy_async<4>(to + place + i * place_hop, cursor + i * hop, exists ? 4 : 0);
        }
        cursor += stride;
    }
};

// Coordinates of z on their way: each thread a few runs of 4 points.
struct Runs {
    static constexpr int QUADS = POINTS / 4, ACROSS = THREADS / QUADS;  // features side by side
    static constexpr int PER_THREAD = (FEATURES + ACROSS - 1) / ACROSS;
    const float* cursor;
    i64 hop;
    int place, t, features;

    __device__ __forceinline__ Runs(const float* data, i64 line_stride, i64 exist) {
        int feature = threadIdx.x / QUADS, quad = threadIdx.x % QUADS;
        t = quad * 4;
        features = int(min(exist, i64(FEATURES))) - feature;
        cursor = data + feature * line_stride + t;
        hop = ACROSS * line_stride;
        place = (quad / 4 * FEATURES + feature) * 16 + quad % 4 * 4;
    }

    __device__ __forceinline__ void begin(float* to, int left) {
        int bytes = max(0, min(4, left - t)) * 4;
        const float* from = cursor;
#pragma unroll
        for (int i = 0; i < PER_THREAD; ++i) {
            if (FEATURES % ACROSS && threadIdx.x / QUADS + i * ACROSS >= FEATURES) break;
            copy_async<16>(to + place + i * ACROSS * 16, from, i * ACROSS < features ? bytes : 0);
            from += hop;
        }
        cursor += POINTS;
    }
};

// Moves the raw operands of a stage. What does not exist becomes zeros: points of no weight, and
// lines of which nothing is stored.
struct Loader {
    Runs z;
    Elements<QUERIES> weights;
    Elements<COLUMNS> coefficients;
    bool weighted;

    __device__ __forceinline__ Loader(const Parameters& parameters, const Share& share, i64 q0,
                                      i64 k0, i64 t0)
        : z(parameters.z + share.l * parameters.z_view.batch_stride +
                k0 * parameters.z_view.column_stride + t0,
            parameters.z_view.column_stride, parameters.features - k0),
          weights(parameters.weights + share.l * parameters.weights_view.batch_stride +
                      q0 * parameters.weights_view.row_stride +
                      t0 * parameters.weights_view.column_stride,
                  parameters.weights_view.row_stride, parameters.weights_view.column_stride,
                  parameters.queries - q0),
          coefficients(parameters.coefficients +
                           share.l * parameters.coefficients_view.batch_stride +
                           share.tile_o * COLUMNS * parameters.coefficients_view.row_stride +
                           t0 * parameters.coefficients_view.column_stride,
                       parameters.coefficients_view.row_stride,
                       parameters.coefficients_view.column_stride,
                       parameters.coefficient_count - share.tile_o * COLUMNS),
          weighted(!SINGLE || parameters.coefficient_count > 0) {}

    // The next stage, of whose points `left` exist.
    __device__ __forceinline__ void begin(float* raw, int left) {
        z.begin(raw, left);
        weights.begin(raw + Z_STAGE, left);
        if (weighted) coefficients.begin(raw + Z_STAGE + W_STAGE, left);
    }
};

// The three parts of weights, which are the columns of a SINGLE coefficient.
__device__ __forceinline__ void make_single_terms(unsigned char* terms, const float* raw,
                                                  bool weighted) {
    constexpr int TASKS = QUERIES * STEPS * 4;
    const float* weights = raw + Z_STAGE;
#pragma unroll
    for (int i = 0; i < (TASKS + THREADS - 1) / THREADS; ++i) {
        int task = threadIdx.x + i * THREADS;
        if (task >= TASKS) break;
        int place = task / 4, quad = task % 4, q = place / STEPS, t = place % STEPS * 16 + quad * 4;
        auto w = load_vector<float, 4>(weights + q * LINE + t);
        if (weighted) {
            auto c = load_vector<float, 4>(weights + W_STAGE + t);
#pragma unroll
            for (int e = 0; e < 4; ++e) w.element[e] *= c.element[e];
        }
        u32* to = reinterpret_cast<u32*>(terms + place * TERM_BYTES) + quad * 2;
#pragma unroll
        for (int term = 0; term < 3; ++term) {
            Vector<u32, 2> parts;
            parts.element[0] = split(w.element[0], w.element[1]);
            parts.element[1] = split(w.element[2], w.element[3]);
            store_vector(to + term * 8, parts);
        }
    }
}

// c W of one stage, split, as the lanes of a warp will read it.
__device__ __forceinline__ void make_terms(unsigned char* terms, const float* raw, bool weighted) {
    if (SINGLE) return make_single_terms(terms, raw, weighted);
    constexpr int LANES = 32 * COLUMN_TILES;          // of one query and step
    constexpr int TASKS = QUERIES * STEPS * LANES;
    constexpr int HOP = THREADS / LANES;
    static_assert(TASKS % THREADS == 0 && THREADS % LANES == 0 && HOP % STEPS == 0, "whole rounds");
    int lane = threadIdx.x % 32, o = threadIdx.x % LANES / 32 * 8 + lane / 4;
    int place = threadIdx.x / LANES, t = place % STEPS * 16 + lane % 4 * 4;
    const float* weights = raw + Z_STAGE + place / STEPS * LINE + t;
    auto c = load_vector<float, 4>(raw + Z_STAGE + W_STAGE + o * LINE + t);
    TwoTerms* to = reinterpret_cast<TwoTerms*>(terms) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TASKS / THREADS; ++i) {
        auto w = load_vector<float, 4>(weights + i * (HOP / STEPS) * LINE);
        float value[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) value[e] = w.element[e] * c.element[e];
        to[i * THREADS] = two_terms(value);
    }
}

// The place of a warp's queries and features in the tile, and of a lane's.
struct Place {
    int q, k, row, column;
    __device__ __forceinline__ Place() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        q = warp / WARPS_K * QUERIES_A_WARP;
        k = warp % WARPS_K * FEATURE_TILES * 16;
        row = lane / 4;
        column = lane % 4;
    }
};

struct Weights {
    u32 high[COLUMN_TILES][2], low[COLUMN_TILES][2];
};

__device__ __forceinline__ void read_weights(Weights& weights, const unsigned char* terms, int q,
                                             int step) {
    const unsigned char* from = terms + (q * STEPS + step) * TERM_BYTES;
    int lane = threadIdx.x % 32;
    if (SINGLE) {
        // Columns 0, 1, 2; the others come to nothing that is read.
        auto parts = reinterpret_cast<const Vector<u32, 2>*>(from)[lane % 16];
        weights.high[0][0] = parts.element[0];
        weights.high[0][1] = parts.element[1];
        return;
    }
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n) {
        auto made = load_vector<u32, 4>(reinterpret_cast<const u32*>(from) + (n * 32 + lane) * 4);
        weights.high[n][0] = made.element[0];
        weights.high[n][1] = made.element[1];
        weights.low[n][0] = made.element[2];
        weights.low[n][1] = made.element[3];
    }
}

// The products of a query's slopes at 16 features, two of them the lane's own, and 16 points.
__device__ __forceinline__ void multiply(float (&sums)[COLUMN_TILES][4], const float (&x)[2],
                                         const Vector<float, 4> (&z)[2], const Weights& weights,
                                         const Exponents& exponents) {
    u32 high[4], low[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the lane's four points
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float first = x[r] - z[r].element[half * 2], second = x[r] - z[r].element[half * 2 + 1];
            if (Slope::SIGN) {
                high[half * 2 + r] = signs(first, second);
            } else {
                first = Slope::at(first, exponents);
                second = Slope::at(second, exponents);
                high[half * 2 + r] = split(first, second);
                low[half * 2 + r] = pack(first, second);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n) {
        multiply_fragments<bfloat16_t>(sums[n], high, weights.high[n]);
        if (!SINGLE) multiply_fragments<bfloat16_t>(sums[n], high, weights.low[n]);
        if (!Slope::SIGN) multiply_fragments<bfloat16_t>(sums[n], low, weights.high[n]);
    }
}

using Coordinates = float[QUERIES_A_WARP][FEATURE_TILES][2];

__device__ __forceinline__ void add_stage(Sums& sums, const Coordinates& x, const float* raw,
                                          const unsigned char* terms, const Place& place,
                                          const Exponents& exponents) {
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step) {
        Weights weights[QUERIES_A_WARP];
#pragma unroll
        for (int q = 0; q < QUERIES_A_WARP; ++q) read_weights(weights[q], terms, place.q + q, step);
        const float* points = raw + (step * FEATURES + place.k + place.row) * 16 + place.column * 4;
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
            Vector<float, 4> z[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                z[r] = load_vector<float, 4>(points + (f * 16 + r * 8) * 16);
            }
#pragma unroll
            for (int q = 0; q < QUERIES_A_WARP; ++q) {
                multiply(sums[q][f], x[q][f], z, weights[q], exponents);
            }
        }
    }
}

__device__ __forceinline__ void read_x(Coordinates& x, const Parameters& parameters, i64 l, i64 q0,
                                       i64 k0, const Place& place) {
    const View& view = parameters.x_view;
    const float* from = parameters.x + l * view.batch_stride;
#pragma unroll
    for (int i = 0; i < QUERIES_A_WARP; ++i) {
        i64 q = min(q0 + place.q + i, parameters.queries - 1);
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                i64 k = min(k0 + place.k + f * 16 + r * 8 + place.row,
                            i64(parameters.features) - 1);
                x[i][f][r] = from[q * view.row_stride + k * view.column_stride];
            }
        }
    }
}

// Whether a coordinate's signs ought to be NaN: it is one, one of the other points' coordinates is,
// or two equal infinities meet.
__device__ __forceinline__ bool loses(const Parameters& parameters, i64 l, i64 k, float x) {
    const float* extremes = parameters.extremes + l * parameters.extremes_stride;
    float below = x - extremes[k], above = x - extremes[parameters.features + k];
    return below != below || above != above;
}

__device__ __forceinline__ void write(Sums& sums, const Coordinates& x,
                                      const Parameters& parameters, const Share& share, i64 q0,
                                      i64 k0, const Place& place, float factor) {
    const OutView& view = parameters.out_view;
    OutputT* out = parameters.out + share.l * view.batch_stride + share.part * view.part_stride;
#pragma unroll
    for (int i = 0; i < QUERIES_A_WARP; ++i) {
        i64 q = q0 + place.q + i;
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
#pragma unroll
            for (int e = 0; e < 4 * COLUMN_TILES; ++e) {
                int r = e / 2 % 2, n = e / 4;
                i64 k = k0 + place.k + f * 16 + r * 8 + place.row;
                int o = share.tile_o * COLUMNS + n * 8 + place.column * 2 + e % 2;
                float sum = sums[i][f][n][e % 4];
                if (SINGLE) {
                    sum += __shfl_down_sync(~0u, e % 2 == 0 ? sum : 0.0f, 1) + sums[i][f][n][e | 1];
                    if (e % 2 || place.column) continue;
                    o = 0;
                }
                bool inside = q < parameters.queries && k < parameters.features;
                if (!inside || o >= max(parameters.coefficient_count, 1)) continue;
                if (Slope::SIGN && loses(parameters, share.l, k, x[i][f][r])) sum = nan_of(sum);
                OutputT* to = out + o * view.coefficient_stride + q * view.query_stride +
                              k * view.feature_stride;
                sum *= factor;
                *to = convert<OutputT>(parameters.accumulate ? sum + convert<float>(*to) : sum);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
pair_gradient_tensor(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* terms = shared;
    float* stages = reinterpret_cast<float*>(shared + 2 * TERMS);
    i64 q0 = i64(blockIdx.x / parameters.tiles_k) * QUERIES;
    i64 k0 = i64(blockIdx.x % parameters.tiles_k) * FEATURES;
    Place place;

#pragma unroll 1
    for (i64 index = blockIdx.y; index < shares(parameters); index += gridDim.y) {
        Share share(parameters, index);
        int t0 = share.part * parameters.per_part;
        int count = min(parameters.per_part, parameters.points - t0);
        Loader loader(parameters, share, q0, k0, t0);
        float factor;
        Exponents exponents = read_numbers(parameters, share.l, factor);
        Coordinates x;
        Sums sums = {};

        loader.begin(stages, count);
        read_x(x, parameters, share.l, q0, k0, place);
        wait_for_copies();
        __syncthreads();
        loader.begin(stages + RAW, count - POINTS);
        make_terms(terms, stages, loader.weighted);
        int slot = 0, parity = 0;
#pragma unroll 1
        for (int done = 0; done < count; done += POINTS) {
            wait_for_copies();
            __syncthreads();  // the next stage has come, this one's terms are made
            int next = slot == RAW_STAGES - 1 ? 0 : slot + 1;
            int after = next == RAW_STAGES - 1 ? 0 : next + 1;
            loader.begin(stages + after * RAW, count - done - 2 * POINTS);
            make_terms(terms + (1 - parity) * TERMS, stages + next * RAW, loader.weighted);
            add_stage(sums, x, stages + slot * RAW, terms + parity * TERMS, place, exponents);
            slot = next;
            parity = 1 - parity;
        }
        wait_for_copies();
        write(sums, x, parameters, share, q0, k0, place, factor);
        __syncthreads();
    }
}
