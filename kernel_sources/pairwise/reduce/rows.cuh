// Rows of a in the registers of a thread, of kernels for few features: THREADS threads with ROWS
// rows of K features each, a block's rows one after the other. Of problems that would leave
// multiprocessors idle, PARTNERS threads of a block share a row's points.
#pragma once

#include "pairwise/reduce/config.cuh"
#include "pairwise/unit.cuh"

using InputT = Config::InputT;

using Rows = AccT[ROWS][K];

constexpr int SLOTS = THREADS / PARTNERS;  // threads with rows of their own

__device__ __forceinline__ int slot() { return PARTNERS == 1 ? threadIdx.x : threadIdx.x % SLOTS; }

// Of a run of points a partner takes each PARTNERS-th, from this one on: the lanes of a warp then
// read one line or neighbours.
__device__ __forceinline__ int partner() { return PARTNERS == 1 ? 0 : threadIdx.x / SLOTS; }

// Rows past the last one are read as that one and never written.
template <class Parameters>
__device__ __forceinline__ void read_rows(Rows& rows, const Parameters& parameters, i64 l, i64 m0) {
    const auto& view = parameters.a_view;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        i64 m = min(m0 + i * SLOTS, parameters.m - 1);
        const InputT* from = parameters.a + l * view.batch_stride + m * view.row_stride;
#pragma unroll
        for (int k = 0; k < K; ++k) rows[i][k] = convert<AccT>(from[k * view.column_stride]);
    }
}

// The reciprocal of a block's unit, from a pair of points for each thread.
template <class Parameters, class Part>
__device__ __forceinline__ float sample_unit(u32* shared, const Rows& rows,
                                             const Parameters& parameters, const Part& part, i64 l,
                                             float p) {
    const auto& view = parameters.b_view;
    i64 n = part.first + threadIdx.x % max(part.last - part.first, i64(1));
    const InputT* from = parameters.b + l * view.batch_stride + n * view.row_stride;
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
        float size = absolute(Term::of(rows[0][k], convert<AccT>(from[k * view.column_stride])));
        largest = size - size == 0.0f ? fmaxf(largest, size) : largest;
    }
    return unit_of(largest_in_block(shared, largest), p);
}
