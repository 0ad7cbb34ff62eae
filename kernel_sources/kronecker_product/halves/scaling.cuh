// The way numbers of a kernel are scaled: of one word as scale.cuh has it, of two as split.cuh.
#pragma once

#include "kronecker_product/halves/scale.cuh"
#include "kronecker_product/halves/split.cuh"

using Scales = ScalesOf<WORDS>;
template <class R, class M>
using Scaling = ScalingOf<R, M, WORDS>;

// What is found of a tile's columns begins at nothing.
__device__ __forceinline__ void clear_columns(Scales& scales) {
    for (int i = threadIdx.x; i < COLUMNS_SCALED; i += THREADS) scales.columns[i] = 0;
}
