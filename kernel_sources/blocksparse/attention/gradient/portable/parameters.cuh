// What a launch of portable.cuh is given, and what it collects for captured tensors.
#pragma once

#include "blocksparse/attention/gradient/collected.cuh"
#include "blocksparse/attention/parameters.cuh"

using InputT = Config::InputT;

struct Operands {
    const u32* bits;  // of rows of blocks, or of columns
    const InputT *q, *k, *v, *grad;
    // (batch, heads, queries), rest of HAS_SCORE or null; and of so many rows as a head's deltas.
    const float *lse, *rest, *deltas;
    InputT *first, *second;  // of q; or of k and v
};
struct Parameters : Operands,
                    CollectedPointers<COLLECTED>,
                    LengthPointers<LENGTHS>,
                    CapturedPointers<CAPTURED>,
                    Numbers,
                    Fixed {};
static_assert(sizeof(Parameters) == Config::PARAMETER_BYTES, "as the host lays it out");
