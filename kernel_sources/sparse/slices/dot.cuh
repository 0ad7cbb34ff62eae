#pragma once

#include "common/types.cuh"

// sum + the products of four unsigned bytes and four others.
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b, u32 sum) {
    u32 y;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(sum));
    return y;
}
