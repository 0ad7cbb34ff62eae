// What is known in shared memory of the scaling of columns and matrices.
#pragma once

#include "kronecker_product/halves/tile.cuh"

constexpr int MODES = Config::MODES;                    // in all
constexpr int COLUMNS_SCALED = Config::COLUMNS_SCALED;  // of the widest tile

// Of numbers of so many words.
template <int WORDS_>
struct ScalesOf;

// What sums are multiplied by.
template <class R, class M, int WORDS_>
struct ScalingOf;
