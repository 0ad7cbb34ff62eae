// What a launch is given, and where its tiles lie.
//
// Facts and struct Fixed: kernlib/families/kronecker_product/lowering/parameters.py.
#pragma once

#include "common/parameters.cuh"
#include "kronecker_product/types.cuh"

using OutputT = Config::OutputT;                                  // storage of the result
constexpr int RUNS = Config::RUNS, FACTORS = Config::FACTORS;     // of the launch
constexpr int POWERS = Config::POWERS, SUMMANDS = Config::SUMMANDS;
constexpr bool EPILOGUE = Config::EPILOGUE;

// Written at each launch.
struct Pointers {
    const void* sources[RUNS];
    void* targets[RUNS];
    const InputT* factors[FACTORS];
};

// A part of the columns of one batch, as many in each but the last one of a batch.
struct Slab {
    i64 number, batch, own;  // among all, its batch, among its batch's
    bool is_last;            // of its batch
};

// Of slabs.cuh.
template <int COUNT>
struct CounterPointer {
    u32* counters;
};
template <>
struct CounterPointer<1> {};

// Of exponents, from a run to the next.
template <int COUNT>
struct PowerPointers {
    short* powers[COUNT];
};
template <>
struct PowerPointers<0> {};

// Tensors of the result's shape that the epilogue adds a multiple of, of any strides.
template <int COUNT>
struct SummandPointers {
    const InputT* summands[COUNT];
};
template <>
struct SummandPointers<0> {};

struct Parameters : Pointers,
                    CounterPointer<RUNS>,
                    PowerPointers<POWERS>,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");

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
        in = begin(run.source, slab);
        out = begin(run.target, slab);
    }
    __device__ __forceinline__ i64 begin(const Layout& side, const Slab& slab) const {
        i64 number = side.ring ? slab.number % side.ring : slab.own;
        return slab.batch * side.batch_stride + number * side.slab_stride +
               outer * side.outer_stride + inner * side.inner_stride + column * side.column_stride;
    }
};
