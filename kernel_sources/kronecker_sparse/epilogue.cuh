// The costly part of the epilogues over a staged tile.
#pragma once

#include "common/parameters.cuh"

// 16 bytes of the staged tile through epilogues that would take seconds to compile, unrolled over a
// thread's accumulators. Half types have been rounded before, as by a product of torch's.
// feature(e) is that of element e.
template <class Rest, class Feature>
__device__ __forceinline__ void finish_chunk(u32 address, const Rest& rest,
                                             const Feature& feature) {
    constexpr int CHUNK = 16 / sizeof(OutputT);
    union { u32 word[4]; OutputT element[CHUNK]; } x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "r"(address) : "memory");
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        x.element[e] = convert<OutputT>(rest(convert<AccT>(x.element[e]), feature(e)));
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]), "r"(x.word[3])
                 : "memory");
}
