// Strides and hyperparameters, as every pairwise kernel is given them.
#pragma once

#include "common/types.cuh"

struct View {
    i64 batch_stride, row_stride, column_stride;
};

// Places in Parameters::scalars that every pairwise kernel has; the epilogue's follow.
enum { INNER_P, OUTER_P, EPSILON, REGULARIZATION, INNER_SCALE, EPILOGUE };

// Reads the hyperparameters of batch entry l.
template <class Parameters>
struct ScalarReader {
    const Parameters& parameters;
    i64 l;
    __device__ __forceinline__ AccT operator()(int index) const {
        return read_scalar<AccT>(parameters.scalars[index], l * parameters.scalar_strides[index]);
    }
};
