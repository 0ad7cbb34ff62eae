// Instructions by which codes are read and steps are added up.
#pragma once

#include "common/types.cuh"

// Bytes that nothing writes while a kernel runs, and that are read once: BYTES are 1, 2, 4, 8 or a
// multiple of 16. Loads stay in order: ptxas would sink each to its use.
template <int BYTES>
__device__ __forceinline__ void load_once(u32* to, const unsigned char* from) {
    if constexpr (BYTES == 1) {
        asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(to[0]) : "l"(from));
    } else if constexpr (BYTES == 2) {
        u16 x;
        asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(x) : "l"(from));
        to[0] = x;
    } else if constexpr (BYTES == 4) {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    } else {
#pragma unroll
        for (int i = 0; i < BYTES / 4; i += 4)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                         : "l"(from + 4 * i));
    }
}

// sum + the products of four unsigned bytes and four others.
__device__ __forceinline__ u32 dot_bytes(u32 a, u32 b, u32 sum) {
    u32 y;
    asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(sum));
    return y;
}
