// Facts of a portable kernel: class Portable of
// kernlib/families/kronecker_sparse/kernels/factor/portable.py.
#pragma once

#include "common/types.cuh"
#include "kronecker_sparse/portable/access.cuh"

using InputT = Config::InputT;    // storage of left and right
using AccT = Config::AccT;        // arithmetic: float
using OutputT = Config::OutputT;  // storage of out
constexpr int TILE_ROWS = Config::TILE_ROWS;        // 128 x 128, 128 x 64 or 64 x 64
constexpr int TILE_COLUMNS = Config::TILE_COLUMNS;
constexpr int STAGES = Config::STAGES;              // under way
constexpr int MIN_BLOCKS = Config::MIN_BLOCKS;      // CTAs that a multiprocessor holds
constexpr int PRODUCTS = Config::PRODUCTS;          // of one multiplication: 3 for fp32 by 3xTF32
constexpr Access ACCESS_LEFT = Config::ACCESS_LEFT;
constexpr Access ACCESS_RIGHT = Config::ACCESS_RIGHT;
// 3xTF32 sums of this depth are added up in out, which is fp32 then: a chain of 800 additions is
// off by 5e-7, chains of 128 are by 2.6e-7.
constexpr int PART = 1024;
constexpr bool PARTS = PRODUCTS == 3;
