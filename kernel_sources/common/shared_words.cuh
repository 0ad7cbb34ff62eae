// 4, 8 or 16 bytes of shared memory by their address there, each by one instruction.
#pragma once

#include "common/types.cuh"

template <int WORDS>
__device__ __forceinline__ Vector<u32, WORDS> load_shared_words(u32 address) {
    static_assert(WORDS == 2 || WORDS == 4, "one access");
    Vector<u32, WORDS> x;
    if constexpr (WORDS == 4) {
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.element[0]), "=r"(x.element[1]), "=r"(x.element[2]),
                       "=r"(x.element[3])
                     : "r"(address));
    } else {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(x.element[0]), "=r"(x.element[1]) : "r"(address));
    }
    return x;
}

template <int WORDS>
__device__ __forceinline__ void store_shared_words(u32 address, const u32* word) {
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "one access");
    if constexpr (WORDS == 4) {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "r"(address), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                     : "memory");
    } else if constexpr (WORDS == 2) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
                     :: "r"(address), "r"(word[0]), "r"(word[1]) : "memory");
    } else {
        asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(word[0]) : "memory");
    }
}
