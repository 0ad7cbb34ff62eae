// Facts and parameters of the product of a bitmap matrix with few vectors, for the headers that it
// is made of.
#pragma once

#include "common/parameters.cuh"
#include "sparse/quantised/codes.cuh"

using OutputT = Config::OutputT;                       // storage of out
constexpr int WARPS = Config::WARPS;                   // of a CTA: chunks side by side
constexpr int COLUMN_TILES = Config::COLUMN_TILES;     // of 8 vectors; 0 for a single vector
constexpr bool COPY_ENGINE = Config::COPY_ENGINE;      // bulk copies fill the ring, not cp.async
constexpr bool SUMS = Config::SUMS;  // the result goes to the workspace, as float [range][n][row];
                                     // else a CTA takes all ranges of its slabs
constexpr bool IN_DIGITS = Config::IN_DIGITS;  // integers times a single vector: digits.cuh

constexpr int THREADS = 32 * WARPS;
constexpr int TILES = COLUMN_TILES == 0 ? 1 : COLUMN_TILES;
constexpr int PARTIAL = COLUMN_TILES == 0 ? 16 : 128 * TILES;  // sums of a warp's chunk
// Slabs whose sums may wait; one more where only __syncthreads() keeps warps from the oldest.
constexpr int DEPTH = COLUMN_TILES == 0 ? 4 : COPY_ENGINE ? 2 : 3;

struct Pointers {
    const unsigned char* data;
    const u32* offsets;
    const InputT* x;
    void* out;  // or the workspace
};

struct Parameters : Pointers,
                    VectorPointers<Config::VECTORS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");
