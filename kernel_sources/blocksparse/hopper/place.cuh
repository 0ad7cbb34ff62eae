// Where a product's tiles lie, and the sizes and the order that say so: a part of what a launch of
// hopper.cuh, narrow/narrow.cuh or hopper_words/hopper_words.cuh is given.
#pragma once

constexpr bool PARTIAL = false;  // tiles have all of the depth

#include "blocksparse/lists.cuh"

struct Order {
    u32* order;  // by order/order.cuh: a counter of tiles, and units by falling length
};

struct Fixed {
    u32 tiles;
    int groups, column_tiles;                       // tiles of a head's lines, of its columns
    int units, panels, last, ordered;               // see Schedule
    Grid grid;                                      // of lists.cuh: blocks of a head, and words
    int lines, columns;                             // of a head's result
    int dense_heads, dense_batches, value_batches;  // 0 where one serves all, else 1
};

// A tile's place: its unit is a head's group of lines, its panel a batch's columns.
struct Tile {
    int group, column, head, batch;
    template <class P>
    __device__ __forceinline__ Tile(const P& p, int unit, int panel)
        : group(unit % p.groups), column(panel % p.column_tiles), head(unit / p.groups),
          batch(panel / p.column_tiles) {}
};
