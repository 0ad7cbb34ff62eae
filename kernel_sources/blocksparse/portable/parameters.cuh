// What a launch of portable.cuh is given, and what its CTAs compute.
#pragma once

#include "blocksparse/store.cuh"

constexpr int LINES = Config::LINES, DEPTH = Config::DEPTH;  // of a block of op(S)
constexpr bool TRANSPOSED = Config::TRANSPOSED;              // whether op(S) is S^T
constexpr int TILE_LINES = Config::TILE_LINES, TILE_COLUMNS = Config::TILE_COLUMNS;  // of a CTA
constexpr int GROUPS = Config::GROUPS;  // lines of blocks of a tile, 1 where it has part of one
constexpr int STAGES = Config::STAGES;  // under way
// Whether out has float32 sums of parts of the depth, those of one part behind those of another,
// and the epilogue is empty.
constexpr bool PARTIAL = Config::PARTIAL;
constexpr Access ACCESS_VALUES = Config::ACCESS_VALUES, ACCESS_DENSE = Config::ACCESS_DENSE;

#include "blocksparse/lists.cuh"

struct Operands : Lists {
    const InputT* values;
    const InputT* dense;
    OutputT* out;
};

struct Parameters : Operands,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

// Tiles whose columns are the same are neighbours in time: they share panels of dense.
struct Tile {
    int head, block, offset;  // first line of blocks, and of lines in it where a tile has but some
    i64 line, column, part;
    Range range;  // of the part

    __device__ __forceinline__ explicit Tile(const Parameters& p) {
        u32 index = blockIdx.x;
        part = PARTIAL ? index / p.tiles : 0;
        if (PARTIAL) index %= p.tiles;
        range.begin = int(part * p.part_blocks);
        range.end = min(p.grid.depths, range.begin + int(p.part_blocks));
        line = i64(index % p.line_tiles) * TILE_LINES;
        index /= p.line_tiles;
        column = i64(index % p.column_tiles) * TILE_COLUMNS;
        head = index / p.column_tiles;
        block = int(line / LINES);
        offset = int(line % LINES);
    }
};
