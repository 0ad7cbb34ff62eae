// Counters in device memory by which the blocks of one launch wait for each other.
#pragma once

#include "common/types.cuh"

// Whatever this thread and, before a barrier, its block's threads wrote is seen by who reads the
// sum by wait_for_count.
__device__ __forceinline__ void add_release(u32* counter, u32 value) {
    asm volatile("fence.acq_rel.gpu;\n\t"
                 "red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(value) : "memory");
}

// Whether a sum is that large already.
__device__ __forceinline__ bool has_count(const u32* counter, u32 count) {
    u32 seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen >= count;
}
__device__ __forceinline__ void wait_for_count(const u32* counter, u32 count) {
    while (!has_count(counter, count)) __nanosleep(32);
}
