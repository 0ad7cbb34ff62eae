// mbarriers of kernel_sources' common/hopper.cuh: arrivals there are to be, those that are left, and
// the parity of the phase.
#pragma once

#include <map>

#include "common/types.cuh"

struct Arrivals {
    unsigned short all, left;
    unsigned parity;
};
static_assert(sizeof(Arrivals) == sizeof(u64));

inline void barrier_init(u64* barrier, int arrivals) {
    check_alignment(barrier, 8);
    unsigned short count = (unsigned short)(arrivals);
    *reinterpret_cast<Arrivals*>(barrier) = {count, count, 0};
}
inline std::map<u64*, int> bytes_to_come;  // of barriers that were told of copies
inline void barrier_end_phase(u64* barrier) {
    Arrivals& found = *reinterpret_cast<Arrivals*>(barrier);
    if (found.left || bytes_to_come[barrier]) return;
    found.left = found.all;
    found.parity ^= 1;
}
inline void barrier_arrive(u64* barrier) {
    Arrivals& found = *reinterpret_cast<Arrivals*>(barrier);
    if (found.left == 0) std::abort();
    --found.left;
    barrier_end_phase(barrier);
}
inline void barrier_expect(u64* barrier, int bytes) {
    bytes_to_come[barrier] += bytes;
    barrier_arrive(barrier);
}
inline void barrier_bytes(u64* barrier, int bytes) {
    if ((bytes_to_come[barrier] -= bytes) < 0) std::abort();
    barrier_end_phase(barrier);
}
inline void barrier_arrive_by_warp(u64* barrier) {
    wait_for_warp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}
// Until the phase of that parity is over.
inline void barrier_wait(u64* barrier, int parity) {
    for (int turn = 0; reinterpret_cast<volatile Arrivals*>(barrier)->parity == unsigned(parity); ++turn) {
        if (turn == 1 << 22) std::abort();
        next_thread();
    }
}
