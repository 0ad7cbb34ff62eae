// Strides of a tensor, as plans fix them.
#pragma once

#include "common/types.cuh"

struct View {
    i64 batch_stride, row_stride, column_stride;
};
