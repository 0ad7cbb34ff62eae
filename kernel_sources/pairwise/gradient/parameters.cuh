// What every kernel of pair gradients is given, and the numbers it makes of that.
#pragma once

#include "pairwise/gradient/operations.cuh"
#include "pairwise/gradient/slopes.cuh"
#include "pairwise/scalars.cuh"

struct OutView {
    i64 batch_stride, coefficient_stride, query_stride, feature_stride;
    i64 part_stride;  // between the partial sums of parts of the points
};

// Laid out by kernlib/families/pairwise/lowering/gradient.py.
struct Parameters {
    // written at each launch
    const InputT* x;
    const InputT* z;
    const InputT* weights;
    const InputT* coefficients;
    OutputT* out;
    const float* extremes;   // of z along points, for signs on tensor cores: least, then greatest
    const InputT* scales;    // by which differences are multiplied, if there are any
    Scalar scalars[3];
    // fixed by the plan
    i64 scalar_strides[3];
    View x_view;             // (batch, query, feature)
    View z_view;             // (batch, point, feature)
    View weights_view;       // (batch, query, point)
    View coefficients_view;  // (batch, coefficient, point)
    OutView out_view;
    View scales_view;        // (batch, query, point)
    i64 extremes_stride;     // from one batch entry's to the next
    i64 queries, batch;
    double factor;           // of whole sums
    int points, features, coefficient_count;
    int tiles_q, tiles_k, tiles_o;
    int parts, per_part;     // of the points; per_part is a whole number of stages
    int out_vectors;         // aligned stores of CHUNK elements: 1 along features, 2 along queries
    int accumulate;
    int times_p, times_scale;  // whether p and inner_scale belong to the factor
};

enum { EXPONENT, RATE, SMALLEST };

// The numbers of batch entry l, and the factor of its sums.
__device__ __forceinline__ Exponents read_numbers(const Parameters& parameters, i64 l,
                                                  AccT& factor) {
    ScalarReader<Parameters> read{parameters, l};
    AccT p = read(EXPONENT), scale = read(RATE);
    factor = AccT(parameters.factor);
    if (parameters.times_p) factor *= p;
    if (parameters.times_scale) factor *= scale;
    return {p, p - AccT(1), scale * AccT(1.4426950408889634), read(SMALLEST)};
}

// Which points a CTA takes of which batch entry and coefficients: entry `index` of grid axis y.
struct Share {
    int part, tile_o;
    i64 l;
    __device__ __forceinline__ Share(const Parameters& parameters, i64 index) {
        part = int(index % parameters.parts);
        index /= parameters.parts;
        tile_o = int(index % parameters.tiles_o);
        l = index / parameters.tiles_o;
    }
};

__device__ __forceinline__ i64 shares(const Parameters& parameters) {
    return parameters.batch * parameters.tiles_o * parameters.parts;
}
