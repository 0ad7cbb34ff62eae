// common/copy_groups.cuh of kernel_sources: copies are over when they are begun.
#pragma once

#include "common/async_copy.cuh"

inline void commit_copies() {}
template <int PENDING>
inline void wait_for_groups() {}
