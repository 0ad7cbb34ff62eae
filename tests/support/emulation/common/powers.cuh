// common/powers.cuh of kernel_sources, as exact as the host has it.
#pragma once

inline float power_of_2(float x) {
    float y = std::exp2(x);
    return std::fpclassify(y) == FP_SUBNORMAL ? 0.0f : y;
}
inline float log_2(float x) { return std::log2(x); }
