// What a launch of portable_gradient.cuh is given, and what it collects for captured tensors.
#pragma once

#include "blocksparse/attention/collected.cuh"
#include "blocksparse/attention/parameters.cuh"

struct Operands {
    const u32* bits;  // of rows of blocks, or of columns
    const InputT *q, *k, *v, *grad;
    // (batch, heads, queries), rest of HAS_SCORE or null; and of so many rows as a head's deltas.
    const float *lse, *rest, *deltas;
    InputT *first, *second;  // of q; or of k and v
};
struct Fixed {
    Strides q_strides, k_strides, v_strides, grad_strides, first_strides, second_strides;
    Sizes sizes;
    int batches_of_cta, heads_of_cta;  // SUMMED: 1, or all of them
    i64 delta_rows;
    i64 share;  // SHARED: rows or columns of a line of tiles that a CTA has
};

// Laid out by kernlib/families/blocksparse/lowering/attention/portable_gradient.py.
struct Parameters : Operands,
                    CollectedPointers<COLLECTED>,
                    LengthPointers<LENGTHS>,
                    CapturedPointers<CAPTURED>,
                    Numbers,
                    CapturedViews<CAPTURED>,
                    Fixed,
                    CollectedViews<COLLECTED> {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");
