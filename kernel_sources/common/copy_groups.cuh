// Groups of this thread's cp.async: those begun since the last one, closed and waited for.
#pragma once

#include "common/async_copy.cuh"

__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most PENDING of this thread's committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
