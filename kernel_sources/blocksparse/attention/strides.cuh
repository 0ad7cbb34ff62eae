// Strides of operands of attention, as plans fix them.
#pragma once

#include "common/types.cuh"

// From one batch, head and row of an operand to the next.
struct Strides {
    i64 batch, head, row;
    template <class T>
    __device__ __forceinline__ T* of(T* data, int of_batch, int of_head) const {
        return data + of_batch * batch + of_head * head;
    }
};

// From one batch, head, row and column of a captured tensor to the next, 0 along what it lacks.
struct CapturedStrides {
    i64 batch, head, row, col;
};
