// Units of fused_chain/fused_chain.cuh: facts of the second product, parameters, shared memory and
// places.
//
// Facts and struct Fixed: class FusedChain of
// kernlib/families/kronecker_sparse/kernels/chain/fused_chain.py.
#pragma once

#include "common/parameters.cuh"
#include "kronecker_sparse/fused_chain/tiles.cuh"

using AccT = Config::AccT;        // arithmetic
using OutputT = Config::OutputT;  // storage of y
constexpr int COLUMNS = Config::COLUMNS;            // j of a warpgroup's tile of the second product
constexpr int SECOND_DEPTH = Config::SECOND_DEPTH;  // k of its stages
// Whether what a thread has of y fills sectors with what others of its quad have.
constexpr bool DIRECT = Config::DIRECT;
constexpr int VECTORS = Config::VECTORS;

constexpr int SECOND_COLUMNS = WIDE ? COLUMNS : GROUPS * COLUMNS;     // of a unit's tile
constexpr int SECOND_LANE_BYTES = SECOND_COLUMNS * SECOND_DEPTH * 2;
constexpr int SECOND_BYTES = SPAN * SECOND_LANE_BYTES;  // of one of the second
constexpr int MOST_BYTES = FIRST_BYTES > SECOND_BYTES ? FIRST_BYTES : SECOND_BYTES;
static_assert(MOST_BYTES <= STAGE_BYTES, "a stage has room for either product's");

// Unless DIRECT, y is staged by 8 columns. If WIDE a line has each column's l of one warpgroup
// behind those of another, so that a thread stores two j at once. The bytes between lines, and
// between warpgroups, have what is stored or loaded at the same time lie in other banks.
constexpr int PART_COLUMNS = 8;
constexpr int PART_LINE = PART_COLUMNS * SPAN * 2;
constexpr int GROUP_PITCH = PART_COLUMNS * LANES * 2 + 32;
constexpr int PART_PITCH = WIDE ? WARPGROUPS * GROUP_PITCH + 64 : PART_LINE + (LANES % 2 ? 0 : 16);
constexpr int PART_BYTES = 16 * PART_PITCH;  // of the rows of a warp
constexpr int OUT_BYTES = DIRECT ? 0 : (WIDE ? 4 : 4 * WARPGROUPS) * PART_BYTES;
constexpr int FEATURES = COLUMNS * LANES;  // of a warpgroup's tile

struct Maps {
    TensorMap x, first;
};

struct Operands {
    const unsigned char* second;  // packed by hopper/pack.cuh
    OutputT* y;
};

struct Parameters : Maps, Operands, VectorPointers<VECTORS>, Scalars<Config::SCALARS>, Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

struct Shared {
    unsigned char* h;
    unsigned char* stages;
    unsigned char* out;
    InputT* vectors;
    u64 *full, *empty;
};

// A unit's place. Those of the same rows are neighbours, so that x comes from L2 but once.
struct Unit {
    int row, lane, group, first_tile, last_tile;
    __device__ __forceinline__ Unit(const Parameters& p, u32 index) {
        int split = index % p.splits;
        index /= p.splits;
        lane = index % p.spans * SPAN;
        index /= p.spans;
        row = index % p.row_tiles * TILE_ROWS;
        group = index / p.row_tiles;
        first_tile = split * p.column_tiles / p.splits;
        last_tile = (split + 1) * p.column_tiles / p.splits;
    }
};
