// sparse/bitmap/warp.cuh of kernel_sources, of kernels without the copy engine.
#pragma once

#include "common/types.cuh"

inline u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }
inline void keep(u32&) {}
inline bool elect_lane() { return threadIdx.x % 32 == 0; }
