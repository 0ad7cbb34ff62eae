// common/mma_double.cuh of kernel_sources.
#pragma once

#include "common/mma.cuh"

inline void multiply_fragments(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
    multiply_by_lanes(d, a, b);
}
