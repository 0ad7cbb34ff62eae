// common/shared_words.cuh of kernel_sources, without PTX.
#pragma once

#include "common/types.cuh"

template <int WORDS>
inline Vector<u32, WORDS> load_shared_words(u32 address) {
    check_alignment(shared + address, WORDS * 4);
    Vector<u32, WORDS> x;
    std::memcpy(&x, shared + address, sizeof(x));
    return x;
}

template <int WORDS>
inline void store_shared_words(u32 address, const u32* word) {
    check_alignment(shared + address, WORDS * 4);
    std::memcpy(shared + address, word, WORDS * 4);
}
