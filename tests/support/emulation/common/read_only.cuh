// common/read_only.cuh of kernel_sources.
#pragma once

#include "common/types.cuh"

inline int load_int(const int* from) { return *from; }
inline void load_if(u32 (&x)[4], bool exists, const void* from) {
    std::memset(x, 0, 16);
    if (!exists) return;
    check_alignment(from, 16);
    std::memcpy(x, from, 16);
}
inline void load_once_if(u32 (&x)[4], bool exists, const void* from) { load_if(x, exists, from); }
