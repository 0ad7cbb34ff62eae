// The costly part of the epilogues over a staged tile.
#pragma once

#include "common/parameters.cuh"
#include "common/shared_words.cuh"

using OutputT = Config::OutputT;  // as the tile is staged

// 16 bytes of the staged tile through epilogues that would take seconds to compile, unrolled over a
// thread's accumulators. Half types have been rounded before, as by a product of torch's.
// feature(e) is that of element e.
template <class Rest, class Feature>
__device__ __forceinline__ void finish_chunk(u32 address, const Rest& rest,
                                             const Feature& feature) {
    constexpr int CHUNK = 16 / sizeof(OutputT);
    union { Vector<u32, 4> words; OutputT element[CHUNK]; } x;
    x.words = load_shared_words<4>(address);
#pragma unroll
    for (int e = 0; e < CHUNK; ++e)
        x.element[e] = convert<OutputT>(rest(convert<AccT>(x.element[e]), feature(e)));
    store_shared_words<4>(address, x.words.element);
}
