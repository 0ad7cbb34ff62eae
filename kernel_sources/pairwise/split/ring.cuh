// What a producer and consumers of things in shared memory count.
#pragma once

// A ring of things in shared memory: the one that is next, and the parity of its barrier's phase.
template <int COUNT>
struct Ring {
    int place = 0, parity;
    __device__ __forceinline__ explicit Ring(int parity) : parity(parity) {}
    __device__ __forceinline__ void advance() {
        if (++place == COUNT) place = 0, parity ^= 1;
    }
};
