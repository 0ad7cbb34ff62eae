// 16 bytes to device memory by one instruction, which the compiler takes apart where it has other
// uses of the words.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ void store_chunk(void* to, const Vector<u32, 4>& words) {
    const u32* word = words.element;
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}
