// What a launch of hopper_words.cuh is given.
#pragma once

#include "blocksparse/hopper/place.cuh"
#include "blocksparse/hopper_words/format.cuh"
#include "blocksparse/summands.cuh"

using OutputT = Config::OutputT;
constexpr int SUMMANDS = Config::SUMMANDS;

// Written at each launch: what pack.cuh made, and the result.
struct Packed {
    const unsigned char* piece_words;
    const float* piece_scales;
    const unsigned char* panel_words;
    const float* panel_scales;
    OutputT* out;
};

struct Parameters : Packed,
                    Lists,
                    Order,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

constexpr int WARPGROUPS = Config::WARPGROUPS, TILE_LINES = 64 * WARPGROUPS;
constexpr int SUMS = TILE_COLUMNS / 2;  // accumulators of a thread
