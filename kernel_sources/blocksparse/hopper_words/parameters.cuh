// What a launch of hopper_words.cuh is given.
//
// The generated source defines before it includes this file, beside what these files list:
//   PARAMETER_BYTES   what lowering makes of Parameters
#pragma once

#include "blocksparse/hopper/place.cuh"
#include "blocksparse/summands.cuh"

// Written at each launch: what pack.cuh made, and the result.
struct Packed {
    const unsigned char* piece_words;
    const float* piece_scales;
    const unsigned char* panel_words;
    const float* panel_scales;
    OutputT* out;
};

struct Strides {
    i64 out_batch, out_head, out_line, out_column;
    i64 piece_batch, panel_batch, panel_head;  // in pieces and panels; 0 where one serves all
    int depths;                                // panels of a column of tiles
    int pairs;                                 // whether two columns can be written at a time
};

struct Parameters : Packed,
                    Lists,
                    Order,
                    VectorPointers<VECTORS>,
                    SummandPointers<SUMMANDS>,
                    Scalars<SCALARS>,
                    SummandSides<SUMMANDS>,
                    Strides,
                    Fixed {};
static_assert(sizeof(Parameters) == PARAMETER_BYTES, "as lowering lays it out");
