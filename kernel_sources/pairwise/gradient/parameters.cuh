// What every kernel of pair gradients is given, and the numbers it makes of that.
#pragma once

#include "pairwise/gradient/operations.cuh"
#include "pairwise/gradient/slopes.cuh"
#include "pairwise/scalars.cuh"

using InputT = Config::InputT;    // storage of the inputs
using AccT = Config::AccT;        // arithmetic
using OutputT = Config::OutputT;  // storage of out
using Slope = Config::Slope;      // a struct of gradient/slopes.cuh
using Numbers = Exponents<AccT>;

struct Operands {
    const InputT* x;
    const InputT* z;
    const InputT* weights;
    const InputT* coefficients;
    OutputT* out;
    const float* extremes;   // of z along points, for signs on tensor cores: least, then greatest
    const InputT* scales;    // by which differences are multiplied, if there are any
};

struct Parameters : Operands, ScalarValues<3>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

enum { EXPONENT, RATE, SMALLEST };

// The numbers of batch entry l, and the factor of its sums.
__device__ __forceinline__ Numbers read_numbers(const Parameters& parameters, i64 l, AccT& factor) {
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
