// The way numbers of a kernel are scaled.
#pragma once

#include "kronecker_product/halves/tile.cuh"

#if PAIRS
#include "kronecker_product/halves/split.cuh"
#else
#include "kronecker_product/halves/scale.cuh"
#endif

// What is found of a tile's columns begins at nothing.
__device__ __forceinline__ void clear_columns(Scales& scales) {
    for (int i = threadIdx.x; i < COLUMNS_SCALED; i += THREADS) scales.columns[i] = 0;
}
