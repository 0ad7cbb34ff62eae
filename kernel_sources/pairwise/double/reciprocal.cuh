// 1/x by one special-function instruction, which reads and writes upper halves: to about 2^-20, for
// what makes the rest exact.
#pragma once

__device__ __forceinline__ double rough_reciprocal(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    return y;
}
