// What codes a kernel of values in fewer bits is for. The kernels of all bits have PLAIN ones.
#pragma once

#include "sparse/quantised/kinds.cuh"

constexpr Codes CODES = Config::CODES;
constexpr int GROUPS = CODES == INT4 ? 2 : 1;  // of columns, which share a scale
