// What warpgroups need whose matrix instructions overlap, their own and each other's.
#pragma once

#include "common/hopper.cuh"

// Sums that wgmma has written asynchronously: behind the wait for them no use of theirs is moved
// before it.
template <int COUNT>
__device__ __forceinline__ void keep_behind(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i]) :: "memory");
}

// Words that wgmma reads from registers: they are there before what follows.
template <int STEPS>
__device__ __forceinline__ void keep_words(u32 (&words)[STEPS][4]) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(words[i][j]) :: "memory");
    }
}

// A word that what is computed of it is computed here, and not kept from before.
__device__ __forceinline__ void compute_here(u32& word) { asm volatile("" : "+r"(word)); }

// What a sum that is not negative needs is done before the wait behind it: ptxas moves exponentials
// behind a wait for matrix instructions that they have nothing to do with, beside which they are to
// run. A sum below 0 would sleep.
__device__ __forceinline__ void done_before(float sum) {
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "setp.lt.f32 p, %0, 0f00000000;\n\t"
                 "@p nanosleep.u32 0;\n\t"
                 "}" :: "f"(sum) : "memory");
}
