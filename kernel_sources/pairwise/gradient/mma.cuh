// Products of slopes and split weights by mma.sync, on every GPU. A warp has QUERIES_A_WARP queries
// and FEATURE_TILES tiles of 16 neighbouring features.
//
// Facts and structs OutView and Fixed: class TensorMma of
// kernlib/families/pairwise/kernels/gradient_tensor.py.
#pragma once

#include "pairwise/gradient/tensor.cuh"

constexpr int PART_BYTES = 32 * 4 * Parts::WORDS;  // of a tile of columns
// Of a query and a step:
constexpr int TERM_BYTES = SINGLE ? 8 * 16 : Parts::PARTS * PART_BYTES * COLUMN_TILES;

// In the order of the program where it is long: hoisted, they would not fit registers.
template <int N>
__device__ __forceinline__ Vector<u32, N> read_part(const u32* from) {
    if constexpr (N == 4) return load_shared_in_order<u32, N>(from);
    else return load_vector<u32, N>(from);
}

struct Weights {
    Vector<u32, Parts::WORDS> part[COLUMN_TILES][SINGLE ? 1 : Parts::PARTS];
};

__device__ __forceinline__ void read_weights(Weights& weights, const unsigned char* terms, int q,
                                             int step) {
    const unsigned char* from = terms + (q * STEPS + step) * TERM_BYTES;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < COLUMN_TILES * (SINGLE ? 1 : Parts::PARTS); ++i) {
        // SINGLE: columns 0, 1, 2; the others come to nothing that is read.
        int place = SINGLE ? lane % 16 : lane;
        auto line = reinterpret_cast<const u32*>(from + i * PART_BYTES) + place * Parts::WORDS;
        weights.part[i / Parts::PARTS][SINGLE ? 0 : i % Parts::PARTS] =
            read_part<Parts::WORDS>(line);
    }
}

// Whether a step's weights of all queries fit registers beside the sums.
constexpr bool KEPT = Slope::SIGN && COLUMN_TILES == 1;

template <class Made>
__device__ __forceinline__ void multiply(float (&sums)[COLUMN_TILES][4], const Made& slopes,
                                         const Weights& weights) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n) {
        const auto& parts = weights.part[n];
        if constexpr (Slope::SIGN) {
#pragma unroll
            for (int i = SINGLE ? 0 : Parts::PARTS - 1; i >= 0; --i) {
                multiply_fragments<bfloat16_t>(sums[n], slopes.high, parts[i].element);
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 first[2] = {parts[0].element[half * 2], parts[0].element[half * 2 + 1]};
                u32 second[2] = {parts[1].element[half * 2], parts[1].element[half * 2 + 1]};
                multiply_fragments<float>(sums[n], slopes.low[half], first);
                multiply_fragments<float>(sums[n], slopes.high[half], second);
                multiply_fragments<float>(sums[n], slopes.high[half], first);
            }
        }
    }
}

struct ByMma {
    static constexpr int TERMS = QUERIES * STEPS * TERM_BYTES;

    // The place of a warp's queries and features in the tile, and of a lane's.
    struct Place {
        static constexpr int STEP = 16;  // features from one tile of a warp to its next
        int q, k, row, column;
        __device__ __forceinline__ Place() {
            int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            q = warp / WARPS_K * QUERIES_A_WARP;
            k = warp % WARPS_K * FEATURE_TILES * 16;
            row = lane / 4;
            column = lane % 4;
        }
    };

    // One of the three parts of four weights of the only coefficient.
    static __device__ __forceinline__ void store_single(unsigned char* terms, int place, int quad,
                                                        int part, u32 first, u32 second) {
        u32* to = reinterpret_cast<u32*>(terms + place * TERM_BYTES) + part * 8 + quad * 2;
        store_vector(to, Vector<u32, 2>{first, second});
    }

    // Four weights of column o.
    static __device__ __forceinline__ void store_terms(unsigned char* terms, int place, int o,
                                                       int quad, const Parts& made) {
        unsigned char* to = terms + place * TERM_BYTES + o / 8 * Parts::PARTS * PART_BYTES;
        int lane = o % 8 * 4 + quad;
#pragma unroll
        for (int i = 0; i < Parts::PARTS; ++i) {
            Vector<u32, Parts::WORDS> part;
#pragma unroll
            for (int w = 0; w < Parts::WORDS; ++w) part.element[w] = made.part[i][w];
            store_vector(reinterpret_cast<u32*>(to + i * PART_BYTES) + lane * Parts::WORDS, part);
        }
    }

    static __device__ __forceinline__ void publish_terms() {}

    // The three parts of weights, which are the columns of a SINGLE coefficient.
    static __device__ __forceinline__ void make_single_terms(unsigned char* terms, const float* raw,
                                                             bool weighted) {
        constexpr int TASKS = QUERIES * STEPS * 4;
        const float* weights = raw + Z_STAGE;
#pragma unroll
        for (int i = 0; i < (TASKS + THREADS - 1) / THREADS; ++i) {
            int task = threadIdx.x + i * THREADS;
            if (TASKS % THREADS && task >= TASKS) break;
            int place = task / 4, quad = task % 4;
            int q = place / STEPS, t = place % STEPS * 16 + quad * 4;
            auto w = load_vector<float, 4>(weights + q * LINE + t);
            if (weighted) {
                auto c = load_vector<float, 4>(weights + W_STAGE + t);
#pragma unroll
                for (int e = 0; e < 4; ++e) w.element[e] *= c.element[e];
            }
#pragma unroll
            for (int part = 0; part < 3; ++part) {
                u32 first = cut(w.element[0], w.element[1]);
                store_single(terms, place, quad, part, first, cut(w.element[2], w.element[3]));
            }
        }
    }

    static __device__ __forceinline__ void add_stage(Sums& sums, const Coordinates& x,
                                                     const float* raw, const unsigned char* terms,
                                                     const Place& place,
                                                     const Numbers& exponents) {
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {
            Weights weights[KEPT ? QUERIES_A_WARP : 1];
#pragma unroll
            for (int q = 0; KEPT && q < QUERIES_A_WARP; ++q) {
                read_weights(weights[q], terms, place.q + q, step);
            }
            int feature = step * FEATURES + place.k + place.row;
            const float* points = raw + feature * 16 + place.column * 4;
#pragma unroll
            for (int f = 0; f < FEATURE_TILES; ++f) {
                Points z(points + f * Place::STEP * 16);
#pragma unroll
                for (int q = 0; q < QUERIES_A_WARP; ++q) {
                    Slopes slopes;
                    slopes.make(x[q][f], z, exponents);
                    if (!KEPT) read_weights(weights[0], terms, place.q + q, step);
                    multiply(sums[q][f], slopes, weights[KEPT ? q : 0]);
                }
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, Config::BLOCKS)
pair_gradient_tensor(const __grid_constant__ Parameters parameters) {
    sum_points<ByMma>(parameters);
}
