// What a launch of hopper.cuh or of narrow/narrow.cuh is given, and where its tiles lie.
//
// The generated source defines before it includes this file, beside what these files list:
//   BY_MAPS           whether operands come by tensor copies, else by those of threads
//   PARAMETER_BYTES   what lowering makes of Parameters
#pragma once

#include "blocksparse/lists.cuh"
#include "blocksparse/summands.cuh"
#include "common/hopper.cuh"

// Written at each launch.
template <bool MAPS>
struct Maps {
    TensorMap values, dense, out;
};
template <>
struct Maps<false> {
    TensorMap out;
};
template <bool MAPS>
struct Operands {};
template <>
struct Operands<false> {
    const InputT *values, *dense;
};

struct Order {
    u32* order;  // by order/order.cuh: a counter of tiles, and units by falling length
};

// Strides of operands that threads copy: of values from batch, slot and row of a block on, of dense
// from batch, head, and what is not contiguous on.
template <bool MAPS>
struct Strides {};
template <>
struct Strides<false> {
    i64 value_batch, value_slot, value_row;
    i64 dense_batch, dense_head, dense_row;
};

struct Fixed {
    u32 tiles;
    int groups, column_tiles;                       // tiles of a head's lines, of its columns
    int units, panels, last, ordered;               // see Schedule
    Grid grid;                                      // of lists.cuh: blocks of a head, and words
    int lines, columns;                             // of a head's result
    int dense_heads, dense_batches, value_batches;  // 0 where one serves all, else 1
};

struct Parameters : Maps<BY_MAPS>,
                    Operands<BY_MAPS>,
                    Lists,
                    Order,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    SummandSides<SUMMANDS>,
                    Strides<BY_MAPS>,
                    Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

// A tile's place: its unit is a head's group of lines, its panel a batch's columns.
struct Tile {
    int group, column, head, batch;
    __device__ __forceinline__ Tile(const Parameters& p, int unit, int panel)
        : group(unit % p.groups), column(panel % p.column_tiles), head(unit / p.groups),
          batch(panel / p.column_tiles) {}
};
