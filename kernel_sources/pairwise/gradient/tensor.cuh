// out[l,o,q,k] (+)= factor sum_t (c[l,o,t] W[l,q,t]) Slope(x[l,q,k] - z[l,t,k]) on tensor cores.
//
// For one query the sum is a product: slopes (16 features x 16 points a warp), which are made in
// registers just where mma.sync or wgmma wants them, times c W (16 points x columns), which the CTA
// makes once a stage for all its features. Both factors are split (gradient/fragments.cuh):
//
//   SIGN      slopes are 1, -1 or 0. Three products, by the parts of c W, whose columns are
//             coefficients; or, with SINGLE, one: the columns are the parts of the only
//             coefficient times W. Nothing is lost.
//   else      two parts of each, three products of TF32, which cost six of bfloat16.
//
// Tensor cores cut off what does not fit their sums: each product loses 2^-26 of the sum so far on
// average, always towards 0, which came to 2e-5 for 10000 points and 3e-4 for 100000. So their sums
// go to totals in shared memory every CHAIN points.
//
// Floors on an H200, K = M = 10000 (points, queries), N = 768, 7.68e10 slopes:
//   issue     SIGN 2.5 slots a slope and 0.4 for three products of 16 columns: 7.5 ms
//             p = 1.5: 6 slots and 0.75: 16 ms; one special-function operation: 18.4 ms
//   products  2.3 ms each for 16 columns
// Reached, in ms: p = 1 12.5 with one column, 20.3 with 8, 32.8 with 16, 53.4 with 32; p = 1.5 53.9
// with 16. By mma.sync and by wgmma alike p = 1 is 8.5 and 4 for each product of 16 x 8 x 16 of a
// tile, 14 clocks of a tensor core, which do not hide behind the slopes.
//
// The main loop of both: Products is ByMma of gradient/mma.cuh or ByWgmma of gradient/wgmma.cuh.
#pragma once

#include "pairwise/gradient/stage.cuh"
#include "pairwise/gradient/tile.cuh"
#include "pairwise/totals.cuh"

constexpr int RAW_STAGES = 3;
constexpr int KEPT_SUMS = SINGLE ? 2 : 4 * COLUMN_TILES;  // the parts of SINGLE become one
using Kept = float[QUERIES_A_WARP][FEATURE_TILES][KEPT_SUMS];
using SumTotals = Totals<float, sizeof(Kept) / 4, THREADS>;

// c W of one stage, split.
template <class Products>
__device__ __forceinline__ void make_terms(unsigned char* terms, const float* raw, bool weighted) {
    if constexpr (SINGLE) return Products::make_single_terms(terms, raw, weighted);
    constexpr int LANES = 32 * COLUMN_TILES;          // of one query and step
    constexpr int TASKS = QUERIES * STEPS * LANES;
    constexpr int HOP = THREADS / LANES;
    static_assert(TASKS % THREADS == 0 && THREADS % LANES == 0 && HOP % STEPS == 0, "whole rounds");
    int lane = threadIdx.x % 32, o = threadIdx.x % LANES / 32 * 8 + lane / 4, quad = lane % 4;
    int place = threadIdx.x / LANES, t = place % STEPS * 16 + quad * 4;
    const float* weights = raw + Z_STAGE + place / STEPS * LINE + t;
    auto c = load_vector<float, 4>(raw + Z_STAGE + W_STAGE + o * LINE + t);
#pragma unroll
    for (int i = 0; i < TASKS / THREADS; ++i) {
        auto w = load_vector<float, 4>(weights + i * (HOP / STEPS) * LINE);
        float value[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) value[e] = w.element[e] * c.element[e];
        Products::store_terms(terms, place + i * HOP, o, quad, Parts(value));
    }
}

// The points of a stage behind the `left` that exist become copies of its first one: the slope at a
// point of zeros may leave float's range, and a weight of 0 makes no 0 of that.
__device__ __forceinline__ void repeat_first(float* raw, int left) {
    if (Slope::FINITE || left >= POINTS) return;
    constexpr int HOP = THREADS / FEATURES;
    static_assert(Slope::FINITE || (THREADS % FEATURES == 0 && POINTS % HOP == 0), "rounds");
    float* first = raw + threadIdx.x % FEATURES * 16;
#pragma unroll
    for (int i = 0; i < POINTS / HOP; ++i) {
        int t = threadIdx.x / FEATURES + i * HOP;
        if (t >= max(left, 1)) first[t / 16 * FEATURES * 16 + t % 16] = *first;
    }
}

template <class Place>
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
                i64 k = min(k0 + place.k + f * Place::STEP + r * 8 + place.row,
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

// The sums that count. Of SINGLE, columns 0 and 1 are in lanes of place.column 0, column 2 in those
// of 1: as far as a lane has them they become one.
template <class Place>
__device__ __forceinline__ void fold(Kept& kept, Sums& sums, const Place& place) {
#pragma unroll
    for (int i = 0; i < QUERIES_A_WARP; ++i) {
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
            float* sum = &sums[i][f][0][0];
#pragma unroll
            for (int e = 0; e < KEPT_SUMS; ++e) {
                kept[i][f][e] = SINGLE ? sum[2 * e] : sum[e];
                if (SINGLE && place.column == 0) kept[i][f][e] += sum[2 * e + 1];
            }
        }
    }
}

// Adds the sums of tensor cores to the totals, which are NaN where they would be infinite, and
// leaves what begins the next ones.
template <class Place>
__device__ __forceinline__ void promote(const SumTotals& totals, Sums& sums, const Place& place) {
    Kept kept;
    fold(kept, sums, place);
    totals.add<false>(&kept[0][0][0]);
#pragma unroll
    for (int i = 0; i < QUERIES_A_WARP; ++i) {
#pragma unroll
        for (int f = 0; f < FEATURE_TILES; ++f) {
            float* sum = &sums[i][f][0][0];
#pragma unroll
            for (int e = 0; e < 4 * COLUMN_TILES; ++e) {
                sum[e] = !SINGLE ? kept[i][f][e] : e % 2 ? 0.0f : kept[i][f][e / 2];
            }
        }
    }
}

template <class Place>
__device__ __forceinline__ void write(const Kept& sums, const Coordinates& x,
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
            for (int e = 0; e < KEPT_SUMS; ++e) {
                int r = SINGLE ? e : e / 2 % 2, n = e / 4;
                i64 k = k0 + place.k + f * Place::STEP + r * 8 + place.row;
                int o = share.tile_o * COLUMNS + n * 8 + place.column * 2 + e % 2;
                float sum = sums[i][f][e];
                if (SINGLE) {
                    sum += __shfl_down_sync(~0u, sum, 1);
                    if (place.column) continue;
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

template <class Products>
__device__ __forceinline__ void sum_points(const Parameters& parameters) {
    using Place = typename Products::Place;
    constexpr int TERMS = Products::TERMS;
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* terms = shared;
    float* stages = reinterpret_cast<float*>(shared + 2 * TERMS);
    SumTotals totals(stages + RAW_STAGES * RAW);
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
        Numbers exponents = read_numbers(parameters, share.l, factor);
        Coordinates x;
        Sums sums = {};
        totals.clear();

        loader.begin(stages, count);
        read_x(x, parameters, share.l, q0, k0, place);
        wait_for_copies();
        __syncthreads();
        loader.begin(stages + RAW, count - POINTS);
        make_terms<Products>(terms, stages, loader.weighted);
        repeat_first(stages, count);
        Products::publish_terms();
        int slot = 0, parity = 0, chain = Config::CHAIN;
#pragma unroll 1
        for (int done = 0; done < count; done += POINTS) {
            wait_for_copies();
            __syncthreads();  // the next stage has come, this one's terms are made
            int next = slot == RAW_STAGES - 1 ? 0 : slot + 1;
            int after = next == RAW_STAGES - 1 ? 0 : next + 1;
            make_terms<Products>(terms + (1 - parity) * TERMS, stages + next * RAW,
                                 loader.weighted);
            repeat_first(stages + next * RAW, count - done - POINTS);
            Products::publish_terms();
            loader.begin(stages + after * RAW, count - done - 2 * POINTS);
            Products::add_stage(sums, x, stages + slot * RAW, terms + parity * TERMS, place,
                                exponents);
            slot = next;
            parity = 1 - parity;
            if (--chain) continue;
            promote(totals, sums, place);
            chain = Config::CHAIN;
        }
        wait_for_copies();
        Kept kept;
        fold(kept, sums, place);
        totals.finish(&kept[0][0][0]);
        write(kept, x, parameters, share, q0, k0, place, factor);
        __syncthreads();
    }
}
