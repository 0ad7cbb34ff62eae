// What a launch of hopper.cuh, narrow/narrow.cuh or scaled/scaled.cuh is given.
//
// Reads of struct Config, beside what is said of an epilogue:
//   BY_MAPS   whether operands come by tensor copies, else by those of threads
//   SCALED    whether blocks, and columns of the dense operand, have scales
#pragma once

#include "blocksparse/hopper/place.cuh"
#include "blocksparse/summands.cuh"
#include "common/hopper.cuh"

using OutputT = Config::OutputT;  // storage of out

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

// Of slots, and of columns.
template <bool SCALES>
struct Scales {};
template <>
struct Scales<true> {
    const float *slot_scales, *column_scales;
};

struct Parameters : Maps<Config::BY_MAPS>,
                    Operands<Config::BY_MAPS>,
                    Lists,
                    Order,
                    Scales<Config::SCALED>,
                    VectorPointers<Config::VECTORS>,
                    SummandPointers<Config::SUMMANDS>,
                    Scalars<Config::SCALARS>,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");
