// A list as a reducer of reduce/reducers.cuh, for split/reduce.cuh: four threads share a row, and
// each keeps a list of what it computes.
#pragma once

#include "pairwise/topk/topk.cuh"

struct Nearest : List {
    static constexpr int COLUMNS = 0, OUTPUTS = 0;
    static constexpr bool LINEAR = false, INDEXED = false;
    bool missed = false;  // a value, for there was no room

    __device__ __forceinline__ Nearest(int = 0) {}

    __device__ __forceinline__ void add(float value, int n, const float*) {
        float x = LARGEST ? -value : value;
        if (!passes(x)) return;
        if (has_room(1)) push(x, n);
        else missed = true;
    }

    __device__ __forceinline__ void merge(const Nearest&) {}
    __device__ __forceinline__ float output(int) const { return 0.0f; }
    __device__ __forceinline__ int index() const { return 0; }
};
