// What a launch of hopper.cuh or of narrow/narrow.cuh is given.
//
// The generated source defines before it includes this file, beside what these files list:
//   BY_MAPS           whether operands come by tensor copies, else by those of threads
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
