// common/async_copy.cuh of kernel_sources: copies that are over when they are begun.
#pragma once

#include "common/barrier.cuh"
#include "common/types.cuh"

template <int BYTES>
inline void copy_async(void* to, const void* from, int bytes) {
    check_alignment(to, BYTES);
    if (bytes) check_alignment(from, BYTES);
    std::memset(to, 0, BYTES);
    std::memcpy(to, from, bytes);
}
inline void wait_for_copies() {}
inline void arrive_after_copies(u64* barrier) { barrier_arrive(barrier); }
