// An operand, and where double/pack.cuh puts it, as plans fix that.
#pragma once

#include "pairwise/view.cuh"

struct PackedSide {
    View view;
    i64 points;
    i64 stride, norms_stride;  // of batch entries as packed, in numbers; 0 for one that all share
    i64 blocks;                // of a batch entry

    __device__ __forceinline__ i64 place(i64 l, i64 point, int k) const {
        return l * view.batch_stride + point * view.row_stride + k * view.column_stride;
    }
};
