// common/tickets.cuh of kernel_sources, for blocks that run one after another: what is waited for is
// there, or never will be.
#pragma once

#include "common/types.cuh"

inline void add_release(u32* counter, u32 value) { *counter += value; }
inline void wait_for_count(const u32* counter, u32 count) {
    if (*counter < count) std::abort();
}
