// FactorStrides of an operand or result of Kronecker-sparse products, as plans fix them.
#pragma once

#include "common/types.cuh"

// Elements from one block i, lane l, line (row or column of the result) and depth to the next.
struct FactorStrides {
    i64 block, lane, line, depth;
};
