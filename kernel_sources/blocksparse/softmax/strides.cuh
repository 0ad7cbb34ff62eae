// Strides of operands of softmax, as plans fix them: a batch is two dimensions.
#pragma once

#include "common/types.cuh"

// Of values, from one entry of the batch to the next, and from one slot, row and column of a block.
struct SlotStrides {
    i64 outer, inner, slot, row, column;
};

// Of a dense operand.
struct DenseStrides {
    i64 outer, inner, head, line, column;
};
