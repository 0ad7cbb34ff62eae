// Strides and sizes of block-sparse products, as plans fix them: types of members of struct Fixed.
#pragma once

#include "common/types.cuh"

// Elements from one batch, head or slot, line and column to the next.
struct Side {
    i64 batch, panel, line, column;

    __device__ __forceinline__ i64 at(i64 batch_index, i64 panel_index, i64 line_index,
                                      i64 column_index) const {
        return batch_index * batch + panel_index * panel + line_index * line +
               column_index * column;
    }
};

struct Grid {
    int lines, depths;          // blocks of a head's op(S), down and across
    int line_words, row_words;  // of a line of op(S), and of a row of S
};
