// pairwise/double/reciprocal.cuh of kernel_sources, without PTX: upper halves, rounded towards 0.
#pragma once

inline double rough_reciprocal(double x) {
    double y = 1.0 / __hiloint2double(__double2hiint(x), 0);
    return __hiloint2double(__double2hiint(y), 0);
}
