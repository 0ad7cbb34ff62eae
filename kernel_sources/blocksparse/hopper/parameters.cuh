// What a launch of hopper.cuh, narrow/narrow.cuh or scaled/scaled.cuh is given.
//
// The generated source defines before it includes this file, beside what these files list:
//   BY_MAPS           whether operands come by tensor copies, else by those of threads
//   SCALED            whether blocks, and columns of the dense operand, have scales
//   PARAMETER_BYTES   what lowering makes of Parameters
#pragma once

#include "blocksparse/hopper/place.cuh"
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

// Strides of operands that threads copy: of values from batch, slot and row of a block on, of dense
// from batch, head, and what is not contiguous on.
template <bool MAPS>
struct Strides {};
template <>
struct Strides<false> {
    i64 value_batch, value_slot, value_row;
    i64 dense_batch, dense_head, dense_row;
};

// Of slots, and of columns; from batch to batch, of columns from head and column to the next too.
template <bool SCALES>
struct Scales {};
template <>
struct Scales<true> {
    const float *slot_scales, *column_scales;
};
template <bool SCALES>
struct ScaleStrides {};
template <>
struct ScaleStrides<true> {
    i64 slot_batch, column_batch, column_head, column_step;
};

struct Parameters : Maps<BY_MAPS>,
                    Operands<BY_MAPS>,
                    Lists,
                    Order,
                    Scales<SCALED>,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    SummandSides<SUMMANDS>,
                    Strides<BY_MAPS>,
                    ScaleStrides<SCALED>,
                    Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");
