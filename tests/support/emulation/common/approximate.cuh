// common/approximate.cuh of kernel_sources, without PTX.
#pragma once

#include "common/math.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

inline float exp2_approximate(float x) {
    float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f : y;
}
inline float for_exp2(float constant) {
    float y = constant * LOG2_E;
    return std::isinf(y) && !std::isinf(constant) ? std::copysign(3.402823466e38f, y) : y;
}
inline float quotient(float x, float y) { return x / y; }
