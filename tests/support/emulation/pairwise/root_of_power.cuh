// pairwise/root_of_power.cuh of kernel_sources, without PTX.
#pragma once

// unit^(p / 2).
inline float root_of_power(float unit, float p) { return std::pow(unit, p * 0.5f); }
