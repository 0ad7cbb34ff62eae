// The launch of parts.cuh begins while the CTAs of the launch before end, whose sums it adds up: on
// GPUs since sm_90.
#pragma once

// Permits the next launch to begin once all CTAs have got here.
__device__ __forceinline__ void permit_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the launch before has ended and what it wrote is seen.
__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
