// What a launch is given, and where its tiles lie.
//
// The generated source defines before it includes this file:
//   InputT, AccT, OutputT        storage of factors and vectors, arithmetic, the result's storage
//   RUNS, FACTORS                of the launch
//   POWERS                       arrays of exponents that go from run to run, 0 or RUNS - 1
//   VECTORS, SUMMANDS, SCALARS   of the epilogue
//   PARAMETER_BYTES              what lowering makes of Parameters
#pragma once

#include "common/parameters.cuh"

// Written at each launch.
struct Pointers {
    const void* sources[RUNS];
    void* targets[RUNS];
    const InputT* factors[FACTORS];
};

struct Matrix {
    i64 row_stride, column_stride, batch_stride;
};

// Elements from one batch, outer index, inner one, column and feature to the next, and from one
// slab to the next: of a batch, or of a ring's slabs, where `ring` is their number and not 0.
struct Side {
    i64 batch_stride, outer_stride, inner_stride, column_stride, feature_stride;
    i64 slab_stride, ring;
};

// A part of the columns of one batch, as many in each but the last one of a batch.
struct Slab {
    i64 number, batch, own;  // among all, its batch, among its batch's
    bool is_last;            // of its batch
};

struct RunFixed {
    Side in, out;
    i64 outers, columns;            // of a slab, columns of one outer and inner index
    i64 last_outers, last_columns;  // of the last slab
    i64 inners;                     // of one outer index
    i64 tiles, tiles_of_columns;    // of a slab; of its columns
    // Of the output feature: from one outer index, inner one, column (divided first) and own
    // feature on.
    i64 feature_outer, feature_inner, feature_column, feature_own, feature_divisor;
    u32 aligned;        // whether the source takes aligned 16-byte copies along the last dimension
    u32 columns_first;  // whether columns lie closer together in the source than features
    u32 aligned_out;    // whether the target does so of 16-byte stores
    u32 ticket_tiles;   // of a ticket, of hopper/slabs.cuh
};

struct Fixed {
    RunFixed runs[RUNS];
    Matrix matrices[FACTORS];
    i64 batches, slabs;  // slabs of a batch
    i64 tickets, lag;    // tiles of a slab in all runs; slabs that a run is behind the one before
};

// Of slabs.cuh.
template <int COUNT>
struct CounterPointer {
    u32* counters;
};
template <>
struct CounterPointer<1> {};

// Of halves/slabs.cuh. An element of a run's tile is of that column of the run before whose number
// is the sum of these strides: from one outer index, feature and inner index to the next, of the
// inner index modulo `inners` and of the column modulo `columns`. A slab of a ring has `slab` of
// them.
struct PowerPlace {
    i64 outer, feature, inner, inners, columns, slab;
};
template <int COUNT>
struct PowerPointers {
    short* powers[COUNT];
};
template <>
struct PowerPointers<0> {};
template <int COUNT>
struct PowerPlaces {
    PowerPlace places[COUNT];
};
template <>
struct PowerPlaces<0> {};

// Tensors of the result's shape that the epilogue adds a multiple of, of any strides.
template <int COUNT>
struct SummandPointers {
    const InputT* summands[COUNT];
};
template <>
struct SummandPointers<0> {};

template <int COUNT>
struct SummandSides {
    Side sides_of_summands[COUNT];
};
template <>
struct SummandSides<0> {};

// Laid out by kernlib/families/kronecker_product/lowering/variant.py.
struct Parameters : Pointers,
                    CounterPointer<RUNS>,
                    PowerPointers<POWERS>,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    Fixed,
                    PowerPlaces<POWERS>,
                    SummandSides<SUMMANDS> {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");

// What a tile is of, and where it begins in source and target.
struct Tile {
    Slab slab;
    i64 outer, inner, column, in, out;
    int columns;  // that exist

    // Tile `index` of a slab, for a kernel of tiles of WIDTH columns.
    __device__ __forceinline__ Tile(const RunFixed& run, const Slab& slab, i64 index, int width)
        : slab(slab) {
        i64 row = index / run.tiles_of_columns;
        column = index % run.tiles_of_columns * width;
        outer = row / run.inners;
        inner = row % run.inners;
        i64 there = slab.is_last ? run.last_columns : run.columns;
        if (outer >= (slab.is_last ? run.last_outers : run.outers)) there = 0;
        columns = int(max(min(there - column, i64(width)), i64(0)));
        in = begin(run.in, slab);
        out = begin(run.out, slab);
    }
    __device__ __forceinline__ i64 begin(const Side& side, const Slab& slab) const {
        i64 number = side.ring ? slab.number % side.ring : slab.own;
        return slab.batch * side.batch_stride + number * side.slab_stride +
               outer * side.outer_stride + inner * side.inner_stride + column * side.column_stride;
    }
};
