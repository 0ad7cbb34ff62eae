// Totals of a thread's sums, in shared memory, where they cost no register.
//
// The rounding of equal terms has one sign: float sums of n of them are off by up to n 2^-26, one
// of 20000 by 3e-4. Chains of 128 whose totals keep what they round off are off by 2e-6 at most,
// however many there are.
#pragma once

#include "common/math.cuh"
#include "common/types.cuh"

template <class T, int COUNT, int THREADS>
struct Totals {
    static constexpr int RUN = 16 / sizeof(T), RUNS = COUNT / RUN, HOP = THREADS * RUN;
    static constexpr int ELEMENTS = COUNT * THREADS;  // of shared memory
    static_assert(COUNT % RUN == 0, "whole runs");
    T* shared;

    __device__ __forceinline__ explicit Totals(T* shared) : shared(shared) {}
    __device__ __forceinline__ T* line(int run) const {
        return shared + threadIdx.x * RUN + run * HOP;
    }

    __device__ __forceinline__ void clear() const {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) store_vector(line(run), Vector<T, RUN>());
    }

    // Adds sums, which are left with what the next chain begins with (KEPT: see add_chain).
    template <bool KEPT>
    __device__ __forceinline__ void add(T* sums) const {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            auto total = load_vector<T, RUN>(line(run));
#pragma unroll
            for (int e = 0; e < RUN; ++e) {
                total.element[e] = add_chain<KEPT>(total.element[e], sums[run * RUN + e]);
            }
            store_vector(line(run), total);
        }
    }

    // Adds the totals to the last sums.
    __device__ __forceinline__ void finish(T* sums) const {
#pragma unroll
        for (int run = 0; run < RUNS; ++run) {
            auto total = load_vector<T, RUN>(line(run));
#pragma unroll
            for (int e = 0; e < RUN; ++e) sums[run * RUN + e] += total.element[e];
        }
    }
};
