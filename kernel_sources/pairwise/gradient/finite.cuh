// A sign is taken by comparison, which loses a NaN. So operands are looked at as they lie in shared
// memory, once a stage (1 % of its time), and what is not finite is noted for the end.
#pragma once

#include "common/math.cuh"
#include "pairwise/operand.cuh"

constexpr int FEATURE_TILES = Config::FEATURE_TILES;  // of TILE features in a CTA's tile: 1 or 2

// Notes of the lines (queries of W, then features of z) of a CTA's tile, in shared memory.
struct Finite {
    static constexpr u32 NAN_SEEN = 1, PLUS = 2, MINUS = 4;  // a NaN, an infinity of either sign
    static constexpr int OPERANDS = 1 + FEATURE_TILES;
    static constexpr int CHUNKS_OF_STAGE = TILE_K * TILE / CHUNK;
    static_assert(CHUNKS_OF_STAGE % THREADS == 0, "whole rounds");
    u32* notes;

    __device__ __forceinline__ explicit Finite(u32* notes) : notes(notes) {}

    // Before the first barrier of a tile.
    __device__ __forceinline__ void clear() {
        if (threadIdx.x < OPERANDS * TILE) notes[threadIdx.x] = 0;
    }

    __device__ __forceinline__ void look(const AccT* stage) {
        AccT sum = AccT(0);  // a NaN if anything is not finite
#pragma unroll
        for (int operand = 0; operand < OPERANDS; ++operand) {
#pragma unroll
            for (int round = 0; round < CHUNKS_OF_STAGE / THREADS; ++round) {
                const AccT* from = place(stage, operand, round * THREADS + threadIdx.x);
                auto chunk = load_vector<AccT, CHUNK>(from);
#pragma unroll
                for (int e = 0; e < CHUNK; ++e) sum = chunk.element[e] * AccT(0) + sum;
            }
        }
        if (sum != sum) note(stage);
    }

    __device__ __forceinline__ static const AccT* place(const AccT* stage, int operand, int chunk) {
        constexpr int ACROSS_LINE = TILE / CHUNK;
        return stage + operand * TILE_K * LINE + chunk / ACROSS_LINE * LINE +
               chunk % ACROSS_LINE * CHUNK;
    }

    __device__ __noinline__ void note(const AccT* stage) {
#pragma unroll 1
        for (int operand = 0; operand < OPERANDS; ++operand) {
#pragma unroll 1
            for (int i = threadIdx.x; i < CHUNKS_OF_STAGE; i += THREADS) {
                const AccT* from = place(stage, operand, i);
                int line = operand * TILE + i % (TILE / CHUNK) * CHUNK;
#pragma unroll 1
                for (int e = 0; e < CHUNK; ++e) {
                    u32 seen = kind(from[e]);
                    if (seen) atomicOr(notes + line + e, seen);
                }
            }
        }
    }

    __device__ __forceinline__ static u32 kind(AccT value) {
        if (value != value) return NAN_SEEN;
        if (absolute(value) != infinity(value)) return 0;
        return value > AccT(0) ? PLUS : MINUS;
    }

    // Whether the sum of a query and a feature, which has coordinate x, ought to be a NaN: one of
    // its weights or coordinates is, or two equal infinities met.
    __device__ __forceinline__ bool loses(int query, int feature, AccT x) const {
        u32 z = notes[TILE + feature], own = kind(x);
        return (notes[query] | z | own) & NAN_SEEN || (own & z);
    }
};
