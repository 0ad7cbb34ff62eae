// common/store_chunk.cuh of kernel_sources, without PTX.
#pragma once

#include "common/types.cuh"

inline void store_chunk(void* to, const Vector<u32, 4>& words) {
    check_alignment(to, 16);
    std::memcpy(to, &words, sizeof(words));
}
