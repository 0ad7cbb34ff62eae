// What split/split.cuh is launched with, and one tile of its result.
#pragma once

#include "pairwise/scalars.cuh"
#include "pairwise/split/tile.cuh"

using InputT = Config::InputT;    // storage of a and b
using OutputT = Config::OutputT;  // storage of out
constexpr bool SYMMETRIC = Config::SYMMETRIC;  // b is a: tiles that reach the diagonal from above

constexpr int PART = 32, PARTS = TILE_N / PART;
constexpr int PART_BYTES = 16 * PART * 4;

struct Operands {
    const InputT* a;
    const InputT* b;
    OutputT* out;
    const u32* gate;
    const unsigned char* packed_a;
    const unsigned char* packed_b;
    const PointInfo* a_info;
    const PointInfo* b_info;
};

struct Parameters : Operands, ScalarValues<Config::SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

using ReadScalar = ScalarReader<Parameters>;

struct Tile {
    int l, row, column;
};
