// What a launch of portable.cuh is given, and what its CTAs compute.
#pragma once

#include "blocksparse/lists.cuh"
#include "blocksparse/store.cuh"

struct Operands : Lists {
    const InputT* values;
    const InputT* dense;
    OutputT* out;
};

struct ValuesView {
    i64 batch, slot, line, depth;
};

struct Fixed {
    ValuesView values_view;
    Side dense_view, out_view;  // a line of dense is a depth
    i64 lines, columns;         // of a head's result
    Grid grid;
    i64 part_stride;               // PARTIAL: elements from one part's sums to the next one's
    u32 line_tiles, column_tiles;  // of a head
    u32 tiles, part_blocks;        // of all heads; of a part of the depth
    u32 batch;
    u32 values_depth_first, dense_depth_first;  // for gathers: which neighbours lie closer together
    u32 whole_stores;                           // of Target
};

// Laid out by kernlib/families/blocksparse/lowering/portable.py.
struct Parameters : Operands,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    Fixed,
                    SummandSides<SUMMANDS> {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

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
