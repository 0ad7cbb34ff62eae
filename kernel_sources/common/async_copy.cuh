// cp.async (sm_80 and later): device memory to shared memory without passing a register.
#pragma once

#include "common/types.cuh"

// Copies `bytes` of the BYTES at `from` and fills the rest with zeros; reads nothing for 0.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(address), "l"(from), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(address), "l"(from), "n"(BYTES), "r"(bytes) : "memory");
    }
}

// Waits for every copy this thread began.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Arrives at an mbarrier once every copy this thread began is over.
__device__ __forceinline__ void arrive_after_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                 :: "r"(static_cast<u32>(__cvta_generic_to_shared(barrier))) : "memory");
}
