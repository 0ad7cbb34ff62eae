// common/overlap.cuh of kernel_sources: a wgmma is done when it is issued.
#pragma once

#include "common/hopper.cuh"

template <int COUNT>
inline void keep_behind(float (&)[COUNT]) {}
template <int STEPS>
inline void keep_words(u32 (&)[STEPS][4]) {}
inline void compute_here(u32&) {}
inline void done_before(float) {}
