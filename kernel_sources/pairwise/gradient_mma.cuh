// Products of slopes and split weights by mma.sync, on every GPU. A warp has QUERIES_A_WARP queries
// and FEATURE_TILES tiles of 16 neighbouring features.
#pragma once

constexpr int TILE_STEP = 16;  // features from one tile of a warp to its next
constexpr int TERM_BYTES = SINGLE ? 8 * 16 : 16 * 32 * COLUMN_TILES;  // of a query and a step
constexpr int TERMS = QUERIES * STEPS * TERM_BYTES;

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

// One of the three parts of four weights of the only coefficient.
__device__ __forceinline__ void store_single(unsigned char* terms, int place, int quad, int part,
                                             u32 first, u32 second) {
    u32* to = reinterpret_cast<u32*>(terms + place * TERM_BYTES) + part * 8 + quad * 2;
    store_vector(to, Vector<u32, 2>{first, second});
}

// Four weights of column o.
__device__ __forceinline__ void store_terms(unsigned char* terms, int place, int o, int quad,
                                            const TwoTerms& made) {
    int lane = o / 8 * 32 + o % 8 * 4 + quad;
    reinterpret_cast<TwoTerms*>(terms + place * TERM_BYTES)[lane] = made;
}

__device__ __forceinline__ void publish_terms() {}

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

__device__ __forceinline__ void multiply(float (&sums)[COLUMN_TILES][4], const Slopes& slopes,
                                         const Weights& weights) {
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; ++n) {
        multiply_fragments<bfloat16_t>(sums[n], slopes.high, weights.high[n]);
        if (!SINGLE) multiply_fragments<bfloat16_t>(sums[n], slopes.high, weights.low[n]);
        if (!Slope::SIGN) multiply_fragments<bfloat16_t>(sums[n], slopes.low, weights.high[n]);
    }
}

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
            Points z(points + f * TILE_STEP * 16);
#pragma unroll
            for (int q = 0; q < QUERIES_A_WARP; ++q) {
                Slopes slopes;
                slopes.make(x[q][f], z, exponents);
                multiply(sums[q][f], slopes, weights[q]);
            }
        }
    }
}
