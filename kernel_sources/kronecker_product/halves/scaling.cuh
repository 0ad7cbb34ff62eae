// The way numbers of a kernel are scaled.
#pragma once

#include "kronecker_product/halves/tile.cuh"

#if PAIRS
#include "kronecker_product/halves/split.cuh"
#else
#include "kronecker_product/halves/scale.cuh"
#endif
