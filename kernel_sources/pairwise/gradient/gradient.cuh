// out[l,o,q,k] (+)= factor sum_t c[l,o,t] W[l,q,t] Slope(Op(x[l,q,k], z[l,t,k])), on the FP32 (or
// FP64) lanes: one CTA a tile of queries and features, which walks over the points t. A thread
// keeps its coordinates of x and its sums in registers; z, W and c come through shared memory, and
// so do scales of pairs, by which Op is multiplied: the reciprocals of norms, whose slopes are
// powers of quotients. They cost one more multiplication a slope.
// float sums go to totals in shared memory every CHAIN points, for 1.2 % of the slots of p = 1.
//
// Floors: gradient/slopes.cuh. A thread's 32 sums take 3 16-byte reads of shared memory a point, so
// that p = 1 costs 4.2 slots instead of 4.
//
// Facts and structs OutView and Fixed: class Gradient of
// kernlib/families/pairwise/kernels/gradient.py.
#pragma once

#include "pairwise/gradient/finite.cuh"
#include "pairwise/gradient/parameters.cuh"
#include "pairwise/operand.cuh"
#include "pairwise/totals.cuh"

using Op = Config::Op;                                 // a struct of gradient/operations.cuh
constexpr int O_TILE = Config::O_TILE;                 // coefficients of a tile: 0 without any
constexpr bool SCALES = Config::SCALES;                // whether there are scales
using WeightsOperand = Operand<Config::ACCESS_W>;      // points t in the part of its features;
using PointsOperand = Operand<Config::ACCESS_Z>;       // that of W is also the scales'

constexpr int SETS = O_TILE == 0 ? 1 : O_TILE;
constexpr int PER_SIDE = TILE / 16;           // queries of a thread
constexpr int CHUNKS = PER_SIDE / CHUNK;
constexpr int CHUNK_STEP = 16 * CHUNK;        // from one run of a thread's points to the next
constexpr int ACROSS = PER_SIDE * FEATURE_TILES;  // features of a thread
constexpr int OPERAND = TILE_K * LINE;
constexpr int COPIED = 1 + FEATURE_TILES + (SCALES ? 1 : 0);  // W, tiles of z, scales
constexpr int STAGE = COPIED * OPERAND + TILE_K * O_TILE;

using Sums = AccT[SETS][PER_SIDE][ACROSS];
constexpr int CHAIN = 128;  // points, whole stages
using SumTotals = Totals<AccT, sizeof(AccT) == 4 ? SETS * PER_SIDE * ACROSS : 0, THREADS>;

// The thread's place in a tile: a warp covers 4 x 8 of the 16 x 16 threads, so that its reads of
// shared memory are broadcasts.
struct Place {
    int q, k;
    __device__ __forceinline__ Place() {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        q = (warp / 2 * 4 + lane / 8) * CHUNK;
        k = (warp % 2 * 8 + lane % 8) * CHUNK;
    }
    __device__ __forceinline__ int query(int i) const {
        return q + i / CHUNK * CHUNK_STEP + i % CHUNK;
    }
    __device__ __forceinline__ int feature(int j) const {
        return k + j / PER_SIDE * TILE + j % PER_SIDE / CHUNK * CHUNK_STEP + j % CHUNK;
    }
};

__device__ __forceinline__ void read_line(AccT* values, const AccT* line) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        auto chunk = load_shared_in_order<AccT, CHUNK>(line + c * CHUNK_STEP);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) values[c * CHUNK + e] = chunk.element[e];
    }
}

// What one point adds: its line of a stage, of W and the other operands at the thread's place, and
// its coefficients.
__device__ __forceinline__ void add_point(Sums& sums, const AccT (&x)[PER_SIDE][ACROSS],
                                          const AccT* line, const Place& place, const AccT* c,
                                          const Numbers& exponents) {
    const AccT* z = line + OPERAND + place.k;
    AccT w[PER_SIDE], points[ACROSS], factors[SETS], scales[PER_SIDE];
    read_line(w, line + place.q);
    if (SCALES) read_line(scales, line + (1 + FEATURE_TILES) * OPERAND + place.q);
#pragma unroll
    for (int f = 0; f < FEATURE_TILES; ++f) read_line(points + f * PER_SIDE, z + f * OPERAND);
#pragma unroll
    for (int o = 0; o < SETS; ++o) factors[o] = O_TILE ? c[o] : AccT(1);
    if (O_TILE == 1) {
#pragma unroll
        for (int i = 0; i < PER_SIDE; ++i) w[i] *= factors[0];
    }
#pragma unroll
    for (int i = 0; i < PER_SIDE; ++i) {
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            AccT v = Op::of(x[i][j], points[j]);
            if (SCALES) v *= scales[i];
            if (Slope::SIGN && SETS == 1) {
                AccT term = Op::chain(flip(w[i], v), points[j]);
                if (v != AccT(0)) sums[0][i][j] += term;
            } else if (SETS == 1) {
                AccT slope = Op::chain(Slope::at(v, exponents), points[j]);
                sums[0][i][j] = multiply_add(slope, w[i], sums[0][i][j]);
            } else {
                AccT term = Slope::SIGN ? (v != AccT(0) ? flip(w[i], v) : AccT(0))
                                        : Slope::at(v, exponents) * w[i];
                term = Op::chain(term, points[j]);
#pragma unroll
                for (int o = 0; o < SETS; ++o) {
                    sums[o][i][j] = multiply_add(factors[o], term, sums[o][i][j]);
                }
            }
        }
    }
}

// The CTA's part of one operand's points, as operand.cuh sees them: points t are its features.
__device__ __forceinline__ Points operand_of(const InputT* data, i64 line_stride, i64 t_stride,
                                             i64 first, i64 count, int begin, int end) {
    // A tile behind the last line reads the first one: nothing of it is stored.
    i64 line = first < count ? first : 0;
    return {data + line * line_stride + begin * t_stride, line_stride, t_stride,
            int(min(count - line, i64(TILE))), end - begin};
}

// The coefficients of one stage's points, a value of one thread.
struct Coefficients {
    const InputT* from;
    i64 t_stride;
    int t;
    bool exists;
    AccT value;

    __device__ __forceinline__ Coefficients(const Parameters& parameters, const Share& share,
                                            int begin) {
        int o = threadIdx.x % SETS;
        t = threadIdx.x / SETS;
        t_stride = parameters.coefficients_view.column_stride;
        int place = share.tile_o * SETS + o;
        exists = O_TILE > 0 && t < TILE_K && place < parameters.coefficient_count;
        from = parameters.coefficients + share.l * parameters.coefficients_view.batch_stride +
               place * parameters.coefficients_view.row_stride + (begin + t) * t_stride;
    }
    __device__ __forceinline__ void begin(int left) {
        if (O_TILE == 0) return;
        value = exists && t < left ? convert<AccT>(*from) : AccT(0);
        from += TILE_K * t_stride;
    }
    __device__ __forceinline__ void end(AccT* to) const {
        if (O_TILE > 0 && t < TILE_K) to[threadIdx.x] = value;
    }
};

// All operands of one stage, on their way.
struct Stages {
    WeightsOperand weights;
    PointsOperand first, second;
    WeightsOperand scales;
    Coefficients coefficients;
    static constexpr int STEPS = COPIED * Operand<Access::strided>::PER_THREAD;

    // One of up to STEPS runs of a thread.
    __device__ __forceinline__ void begin(AccT* stage, int step, int left) {
        int operand = step % COPIED, run = step / COPIED;
        if (step >= STEPS) return;
        if (operand == 0) weights.begin(stage, run, left);
        else if (operand == 1) first.begin(stage + OPERAND, run, left);
        else if (operand <= FEATURE_TILES) second.begin(stage + 2 * OPERAND, run, left);
        else scales.begin(stage + operand * OPERAND, run, left);
    }
    __device__ __forceinline__ void end(AccT* stage, int step) const {
        int operand = step % COPIED, run = step / COPIED;
        if (step >= STEPS) return;
        if (operand == 0) weights.end(stage, run);
        else if (operand == 1) first.end(stage + OPERAND, run);
        else if (operand <= FEATURE_TILES) second.end(stage + 2 * OPERAND, run);
        else scales.end(stage + operand * OPERAND, run);
    }
};

// Sums over the points of one part.
__device__ __forceinline__ void sum_points(Sums& sums, const AccT (&x)[PER_SIDE][ACROSS],
                                           AccT* stages, Stages& operands, const Place& place,
                                           Finite& finite, const SumTotals& totals,
                                           const Numbers& exponents, int count) {
    constexpr int C = COPIED * OPERAND;  // where a stage's coefficients lie
    static_assert(Stages::STEPS <= 8, "runs for each quarter, of different operands");
    operands.coefficients.begin(count);
#pragma unroll
    for (int step = 0; step < Stages::STEPS; ++step) {
        operands.begin(stages, step, count);
        operands.end(stages, step);
    }
    operands.coefficients.end(stages + C);
    int stage = 0, left = count;
#pragma unroll 1
    for (; left >= TILE_K; left -= TILE_K) {
        const AccT* line = stages + stage * STAGE;
        AccT* next = stages + (1 - stage) * STAGE;
        stage = 1 - stage;
        wait_for_copies();
        __syncthreads();  // this stage is complete, and nobody reads the other one any more
        if (Slope::SIGN) finite.look(line);
        const AccT* c = line + C;
        int ahead = left - TILE_K;
        operands.coefficients.begin(ahead);
        // Each quarter of the arithmetic covers the way of one run of a thread. After the last
        // point the runs are zeros that nobody reads.
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            operands.begin(next, quarter, ahead);
            operands.begin(next, quarter + 4, ahead);
#pragma unroll Config::UNROLL
            for (int t = 0; t < TILE_K / 4; ++t) {
                add_point(sums, x, line, place, c, exponents);
                line += LINE;
                c += O_TILE;
            }
            operands.end(next, quarter);
            operands.end(next, quarter + 4);
        }
        operands.coefficients.end(next + C);
        if (ahead % CHAIN < TILE_K) totals.add<true>(&sums[0][0][0]);
    }
    wait_for_copies();
    __syncthreads();
    // A slope at an infinite coordinate times a weight of 0 would be a NaN: no zeros are summed.
    const AccT* line = stages + stage * STAGE;
    const AccT* c = line + C;
    if (Slope::SIGN && left > 0) finite.look(line);
#pragma unroll 1
    for (; left > 0; --left) {
        add_point(sums, x, line, place, c, exponents);
        line += LINE;
        c += O_TILE;
    }
    totals.finish(&sums[0][0][0]);
}

struct Target {
    OutputT* out;
    i64 query_stride, feature_stride;
    int queries, features;  // that exist from the thread's tile on
    bool accumulate;

    __device__ __forceinline__ void put(int q, int k, AccT value) const {
        if (q >= queries || k >= features) return;
        OutputT* to = out + q * query_stride + k * feature_stride;
        *to = convert<OutputT>(accumulate ? value + convert<AccT>(*to) : value);
    }
    __device__ __forceinline__ void put_vector(int q, int k, const AccT (&values)[CHUNK]) const {
        OutputT* to = out + q * query_stride + k * feature_stride;
        Vector<OutputT, CHUNK> old = {}, result;
        if (accumulate) old = load_vector<OutputT, CHUNK>(to);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e) {
            AccT value = accumulate ? values[e] + convert<AccT>(old.element[e]) : values[e];
            result.element[e] = convert<OutputT>(value);
        }
        store_vector(to, result);
    }
};

// CHUNK neighbouring sums, along features or along queries, as one access where out takes it.
template <bool ALONG_FEATURES>
__device__ __forceinline__ void store(const AccT (&sums)[PER_SIDE][ACROSS], const Target& target,
                                      const Place& place, bool vectors) {
    constexpr int RUNS = ALONG_FEATURES ? ACROSS / CHUNK : PER_SIDE / CHUNK;
    constexpr int LINES = ALONG_FEATURES ? PER_SIDE : ACROSS;
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            int i = ALONG_FEATURES ? line : run * CHUNK, j = ALONG_FEATURES ? run * CHUNK : line;
            int q = place.query(i), k = place.feature(j);
            AccT values[CHUNK];
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                values[e] = ALONG_FEATURES ? sums[i][j + e] : sums[i + e][j];
            }
            bool whole = ALONG_FEATURES ? q < target.queries && k + CHUNK <= target.features
                                        : q + CHUNK <= target.queries && k < target.features;
            if (vectors && whole) {
                target.put_vector(q, k, values);
                continue;
            }
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) {
                target.put(q + (ALONG_FEATURES ? 0 : e), k + (ALONG_FEATURES ? e : 0), values[e]);
            }
        }
    }
}

// Coordinates of x; those outside read the last ones, as nothing of them is stored.
__device__ __forceinline__ void read_x(AccT (&x)[PER_SIDE][ACROSS], const Parameters& parameters,
                                       i64 l, i64 q0, i64 k0, const Place& place) {
    const View& view = parameters.x_view;
    const InputT* from = parameters.x + l * view.batch_stride;
#pragma unroll
    for (int i = 0; i < PER_SIDE; ++i) {
        i64 q = min(q0 + place.query(i), parameters.queries - 1);
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) {
            i64 k = min(k0 + place.feature(j), i64(parameters.features) - 1);
            x[i][j] = convert<AccT>(from[q * view.row_stride + k * view.column_stride]);
        }
    }
}

__device__ __forceinline__ void write(Sums& sums, const AccT (&x)[PER_SIDE][ACROSS],
                                      const Parameters& parameters, const Share& share, i64 q0,
                                      i64 k0, const Place& place, const Finite& finite,
                                      AccT factor) {
    const OutView& view = parameters.out_view;
    OutputT* out = parameters.out + share.l * view.batch_stride + share.part * view.part_stride +
                   q0 * view.query_stride + k0 * view.feature_stride;
    Target target{out, view.query_stride, view.feature_stride,
                  int(min(parameters.queries - q0, i64(TILE))),
                  int(min(parameters.features - k0, i64(TILE * FEATURE_TILES))),
                  parameters.accumulate != 0};
#pragma unroll
    for (int o = 0; o < SETS; ++o) {
        int place_o = share.tile_o * SETS + o;
        if (O_TILE > 1 && place_o >= parameters.coefficient_count) break;
#pragma unroll
        for (int i = 0; i < PER_SIDE; ++i) {
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) {
                AccT sum = factor * sums[o][i][j];
                if (Slope::SIGN && finite.loses(place.query(i), place.feature(j), x[i][j])) {
                    sum = nan_of(sum);
                }
                sums[o][i][j] = sum;
            }
        }
        target.out = out + place_o * view.coefficient_stride;
        if (parameters.out_vectors == 2) store<false>(sums[o], target, place, true);
        else store<true>(sums[o], target, place, parameters.out_vectors == 1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, Config::BLOCKS)
pair_gradient(const __grid_constant__ Parameters parameters) {
    extern __shared__ __align__(16) unsigned char shared[];
    AccT* stages = reinterpret_cast<AccT*>(shared);
    SumTotals totals(stages + 2 * STAGE);
    Finite finite(reinterpret_cast<u32*>(stages + 2 * STAGE + SumTotals::ELEMENTS));
    // Features change fastest: CTAs side by side read the same weights, which are the most.
    i64 q0 = i64(blockIdx.x / parameters.tiles_k) * TILE;
    i64 k0 = i64(blockIdx.x % parameters.tiles_k) * TILE * FEATURE_TILES;
    Place place;

#pragma unroll 1
    for (i64 index = blockIdx.y; index < shares(parameters); index += gridDim.y) {
        Share share(parameters, index);
        int begin = share.part * parameters.per_part;
        int end = min(begin + parameters.per_part, parameters.points);
        const View& wv = parameters.weights_view;
        const View& zv = parameters.z_view;
        // Without scales a copy of W's, of which nothing is left.
        const View& sv = SCALES ? parameters.scales_view : wv;
        const InputT* weights = parameters.weights + share.l * wv.batch_stride;
        const InputT* z = parameters.z + share.l * zv.batch_stride;
        const InputT* scales =
            (SCALES ? parameters.scales : parameters.weights) + share.l * sv.batch_stride;
        Stages operands{
            WeightsOperand(operand_of(weights, wv.row_stride, wv.column_stride, q0,
                                      parameters.queries, begin, end)),
            PointsOperand(operand_of(z, zv.column_stride, zv.row_stride, k0,
                                     parameters.features, begin, end)),
            PointsOperand(operand_of(z, zv.column_stride, zv.row_stride, k0 + TILE,
                                     parameters.features, begin, end)),
            WeightsOperand(operand_of(scales, sv.row_stride, sv.column_stride, q0,
                                      parameters.queries, begin, end)),
            Coefficients(parameters, share, begin)};
        AccT x[PER_SIDE][ACROSS], factor;
        Numbers exponents = read_numbers(parameters, share.l, factor);
        read_x(x, parameters, share.l, q0, k0, place);
        Sums sums = {};
        totals.clear();
        if (Slope::SIGN) finite.clear();
        sum_points(sums, x, stages, operands, place, finite, totals, exponents, end - begin);
        if (Slope::SIGN) __syncthreads();  // all has been looked at
        write(sums, x, parameters, share, q0, k0, place, finite, factor);
        __syncthreads();
    }
}
