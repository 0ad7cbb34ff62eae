// A list as a reducer of common/reducers.cuh, for split/reduce.cuh: four neighbouring threads share
// a row, and each keeps a list of what it computes.
#pragma once

#include "pairwise/topk/topk.cuh"

struct Nearest : List {
    static constexpr int COLUMNS = 0, OUTPUTS = 0;
    static constexpr bool LINEAR = false, INDEXED = false, WIDE = false, GROUPED = false;
    bool missed = false;  // a value, for there was no room

    __device__ __forceinline__ Nearest(int = 0) {}

    __device__ __forceinline__ void add(float value, int n, const float*) {
        float x = LARGEST ? -value : value;
        if (!passes(x)) return;
        if (has_room(1)) push(x, n);
        else missed = true;
    }

    // Behind later places: one that equals the last entry may come before it. There is room, as of
    // what is added late and what was added since the last settlement WAITING is no less.
    __device__ __forceinline__ void add_late(float value, int n) {
        push(LARGEST ? -value : value, n);
    }

    // All lanes of a warp call it together. What is behind any list of a row is none of its k, nor
    // is what is behind a quarter of k in each: of 10 among 100000, 150 values pass and not 350.
    __device__ __forceinline__ void settle() {
        List::settle();
        u32 whole = u32(at(k - 1) >> 32), quarter = u32(at((k + 3) / 4 - 1) >> 32);
#pragma unroll
        for (int lane = 1; lane < 4; lane *= 2) {
            whole = min(whole, __shfl_xor_sync(~0u, whole, lane));
            quarter = max(quarter, __shfl_xor_sync(~0u, quarter, lane));
        }
        // One that equals an entry of another list may have a lower place: the next number bounds.
        bound = fminf(bound, number_of(min(min(whole, quarter), ~1u) + 1));
    }

    __device__ __forceinline__ void merge(const Nearest&) {}
    __device__ __forceinline__ float output(int) const { return 0.0f; }
    __device__ __forceinline__ int index() const { return 0; }
};
