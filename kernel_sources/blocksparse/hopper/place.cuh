// Where a product's tiles lie, and the order that says so: a part of what a launch of hopper.cuh,
// narrow/narrow.cuh or hopper_words/hopper_words.cuh is given. Its sizes are members of struct
// Fixed: FIXED of kernlib/families/blocksparse/lowering/hopper.py.
#pragma once

#include "blocksparse/lists.cuh"

struct Order {
    u32* order;  // by order/order.cuh: a counter of tiles, and units by falling length
};

// A tile's place: its unit is a head's group of lines, its panel a batch's columns.
struct Tile {
    int group, column, head, batch;

    __device__ __forceinline__ Tile(const Fixed& p, int unit, int panel)
        : group(unit % p.groups), column(panel % p.column_tiles), head(unit / p.groups),
          batch(panel / p.column_tiles) {}
};
