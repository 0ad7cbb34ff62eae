// What kernels that reduce a matrix over n are launched with, and which part of it a block has.
//
// Struct Fixed: kernlib/families/pairwise/lowering/reduce.py.
#pragma once

#include "pairwise/scalars.cuh"

using InputT = Config::InputT;  // storage of a, b and v, but of what a reducer has WIDE

struct Pointers {
    const InputT* a;
    const InputT* b;
    const InputT* v;
    AccT* out;
    i64* indices;
};

struct Parameters : Pointers, ScalarValues<Config::SCALARS>, Fixed {};

using ReadScalar = ScalarReader<Parameters>;

// The part of one block.
struct Part {
    i64 m0, first, last;  // its first row, its n from first on
    int split;

    __device__ __forceinline__ Part(const Parameters& parameters, i64 m0, int split)
        : m0(m0), first(split * parameters.per_split),
          last(min(first + parameters.per_split, parameters.n)), split(split) {}

    __device__ __forceinline__ Part(const Parameters& parameters, int rows)
        : Part(parameters, i64(blockIdx.x % parameters.row_blocks) * rows,
               int(blockIdx.x / parameters.row_blocks)) {}
};
