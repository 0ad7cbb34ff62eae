// common/tickets.cuh of kernel_sources, for blocks that run one after another: what is waited for is
// there, or comes from threads of the same block, or never will be.
#pragma once

#include "common/types.cuh"

inline void add_release(u32* counter, u32 value) { *counter += value; }
inline bool has_count(const u32* counter, u32 count) { return *counter >= count; }
inline void wait_for_count(const u32* counter, u32 count) {
    for (int turn = 0; !has_count(counter, count); ++turn) {
        if (turn == 1 << 22) std::abort();
        next_thread();
    }
}
