// Loads of what nothing writes while a kernel runs. They stay in order: ptxas otherwise sinks each
// to its use, and few are on their way. Those of 16 bytes give zeros, without reading, unless
// `exists`.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ int load_int(const int* from) {
    int x;
    asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(x) : "l"(from));
    return x;
}

// Bytes that several warps of a multiprocessor read, by its cache.
__device__ __forceinline__ void load_if(u32 (&x)[4], bool exists, const void* from) {
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "setp.ne.s32 p, %5, 0;\n\t"
                 "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n\t"
                 "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
                 : "l"(from), "r"(int(exists)));
}

// Bytes that are read once, and leave that cache to others.
__device__ __forceinline__ void load_once_if(u32 (&x)[4], bool exists, const void* from) {
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "setp.ne.s32 p, %5, 0;\n\t"
                 "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n\t"
                 "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
                 : "l"(from), "r"(int(exists)));
}
