// Strides and hyperparameters, as every pairwise kernel is given them.
#pragma once

#include "common/types.cuh"
#include "pairwise/view.cuh"

using AccT = Config::AccT;  // arithmetic

// Places in Parameters::scalars that every pairwise kernel has; the epilogue's follow.
enum { INNER_P, OUTER_P, EPSILON, REGULARIZATION, INNER_SCALE, EPILOGUE };

// The hyperparameters, written at each launch; what a plan fixes has scalar_strides, a stride over
// the batch for each of them.
template <int COUNT>
struct ScalarValues {
    Scalar scalars[COUNT];
};

// Reads the hyperparameters of batch entry l.
template <class Parameters>
struct ScalarReader {
    const Parameters& parameters;
    i64 l;
    __device__ __forceinline__ AccT operator()(int index) const {
        return read_scalar<AccT>(parameters.scalars[index], l * parameters.scalar_strides[index]);
    }
};
