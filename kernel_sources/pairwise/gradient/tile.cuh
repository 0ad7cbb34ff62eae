// A block's tile of pair gradients by tensor cores, and slopes as the factor of products that is in
// registers.
#pragma once

#include "pairwise/gradient/fragments.cuh"
#include "pairwise/gradient/parameters.cuh"

constexpr bool SINGLE = Config::SINGLE;                  // one coefficient or none, and a sign
constexpr int COLUMN_TILES = Config::COLUMN_TILES;       // of 8 coefficients: 1, 2, 4 by wgmma
constexpr int QUERIES_A_WARP = Config::QUERIES_A_WARP;
constexpr int FEATURE_TILES = Config::FEATURE_TILES;     // of a warp, of 16 features
constexpr int WARPS_Q = Config::WARPS_Q, WARPS_K = Config::WARPS_K;  // side by side
constexpr int STEPS = Config::STEPS;                     // times 16 points of a stage

using Parts = Terms<Slope::SIGN>;

constexpr int THREADS = 32 * WARPS_Q * WARPS_K;
constexpr int QUERIES = QUERIES_A_WARP * WARPS_Q, FEATURES = 16 * FEATURE_TILES * WARPS_K;
constexpr int POINTS = 16 * STEPS;
constexpr int COLUMNS = SINGLE ? 1 : 8 * COLUMN_TILES;
static_assert(!SINGLE || (Slope::SIGN && COLUMN_TILES == 1), "SINGLE is for signs");

using Sums = float[QUERIES_A_WARP][FEATURE_TILES][COLUMN_TILES][4];
using Coordinates = float[QUERIES_A_WARP][FEATURE_TILES][2];

// Coordinates of z of a lane's two features (8 apart) and four points.
struct Points {
    Vector<float, 4> z[2];
    __device__ __forceinline__ explicit Points(const float* from)
        : z{load_vector<float, 4>(from), load_vector<float, 4>(from + 8 * 16)} {}
};

// A query's slopes at those, as fragments: signs of 16 points, or others of 8, and 8, in two parts.
struct Signs {
    u32 high[4];
    __device__ __forceinline__ void put(int half, int r, float first, float second,
                                        const Numbers&) {
        high[half * 2 + r] = signs(first, second);
    }
};
struct Values {
    u32 high[2][4], low[2][4];
    __device__ __forceinline__ void put(int half, int r, float first, float second,
                                        const Numbers& exponents) {
        float slope[2] = {Slope::at(first, exponents), Slope::at(second, exponents)};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            u32 upper = upper_bits(slope[e]);
            high[half][e * 2 + r] = upper;
            low[half][e * 2 + r] = __float_as_uint(slope[e] - __uint_as_float(upper));
        }
    }
};
template <bool SIGN>
struct SlopesOf : Signs {};
template <>
struct SlopesOf<false> : Values {};

struct Slopes : SlopesOf<Slope::SIGN> {
    __device__ __forceinline__ void make(const float (&x)[2], const Points& points,
                                         const Numbers& exponents) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the four points
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const auto& z = points.z[r].element;
                put(half, r, x[r] - z[half * 2], x[r] - z[half * 2 + 1], exponents);
            }
        }
    }
};
