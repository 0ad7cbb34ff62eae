// The root of a squared distance without a branch, to 2^-23. The exact sqrt() branches to a slow
// path for denormals, so that the results which a thread finishes wait for each other.
#pragma once

__device__ __forceinline__ float square_root(float x) {
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
