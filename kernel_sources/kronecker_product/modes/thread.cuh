// The thread's number, as if it were new at each call.
#pragma once

// What follows from it is found where it is used. Else the addresses of all modes, and of all that
// is read and written, would be kept from tile to tile, and spill.
__device__ __forceinline__ int own_thread() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}
