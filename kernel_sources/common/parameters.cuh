// The parameters of a product's epilogues, as a launch is given them.
#pragma once

#include "common/types.cuh"

using InputT = Config::InputT;  // of vectors in memory
using AccT = Config::AccT;      // that Finish computes in

// Empty without vectors or scalars, as base classes are and members are not.
template <int COUNT>
struct VectorPointers {
    const InputT* vectors[COUNT];
    __device__ __forceinline__ const InputT* vector(int index) const { return vectors[index]; }
};
template <>
struct VectorPointers<0> {
    __device__ __forceinline__ const InputT* vector(int) const { return nullptr; }
};

template <int COUNT>
struct Scalars {
    Scalar scalars[COUNT];
    __device__ __forceinline__ AccT scalar(int index) const {
        return read_scalar<AccT>(scalars[index], 0);
    }
};
template <>
struct Scalars<0> {
    __device__ __forceinline__ AccT scalar(int) const { return AccT(); }
};

// Reads the parameters from SCALAR and VECTOR on: those of the epilogues behind the first ones.
template <class Parameters, int SCALAR = 0, int VECTOR = 0>
struct Read {
    const Parameters& parameters;
    __device__ __forceinline__ AccT operator()(int index) const {
        return parameters.scalar(SCALAR + index);
    }
    __device__ __forceinline__ const InputT* vector(int index) const {
        return parameters.vector(VECTOR + index);
    }
};
