// 1 / sqrt(x) by one special-function instruction; denormals count as zero.
#pragma once

__device__ __forceinline__ float fast_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
