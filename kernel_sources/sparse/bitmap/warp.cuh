// What kernels of the bitmap format tell the compiler of a warp's values.
#pragma once

#include "common/types.cuh"

// A value that is the same in all lanes, which the compiler then knows, and forgets how it came
// about: else it works addresses out again, from the CTA's place in its cluster, wherever used.
__device__ __forceinline__ u32 uniform(u32 value) { return __shfl_sync(~0u, value, 0); }

// So that the compiler does not know how to make a value again.
__device__ __forceinline__ void keep(u32& value) { asm volatile("" : "+r"(value)); }

// True in one thread of a warp, from sm_90 on. The copy engine's instructions take their operands
// of a whole warp: behind `lane == 0` the compiler would loop over lanes.
__device__ __forceinline__ bool elect_lane() {
    u32 elected;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "elect.sync _|p, 0xffffffff;\n\t"
                 "selp.b32 %0, 1, 0, p;\n\t"
                 "}" : "=r"(elected));
    return elected;
}
