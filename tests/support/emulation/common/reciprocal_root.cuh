// common/reciprocal_root.cuh of kernel_sources.
#pragma once

inline float fast_rsqrt(float x) { return 1.0f / std::sqrt(x); }
