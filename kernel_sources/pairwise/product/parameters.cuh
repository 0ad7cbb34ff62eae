// What the launches of a product with many columns share: product/pack.cuh, product/product.cuh.
//
// v and values of the matrix are words of fp16, high and low, so that tensor cores multiply them at
// the accuracy of fp32: three products of words, whose fourth is 2^-24 of the whole. Columns of v
// have a power of two for each GROUP of n, values one for each row of a block.
#pragma once

#include "common/hopper.cuh"

constexpr int WIDTH = Config::WIDTH;        // columns of v as padded
constexpr int V_COPIES = Config::V_COPIES;  // 2 for high and low words of v, else 1
constexpr int TILE_N = 64;              // n of a stage
constexpr int GROUP_TILES = 4;          // stages whose products are summed in one go
constexpr int GROUP = GROUP_TILES * TILE_N;
constexpr int STEP = 16;                // n of one wgmma
// Of a stage of v: for each STEP high words, then low ones; of either, for each 8 n (16 bytes), the
// columns; behind them the numbers that the group's sums are to be multiplied by.
constexpr int V_WORDS = WIDTH * STEP * 2;             // bytes of one step's words of one kind
constexpr int V_STEP = V_COPIES * V_WORDS;
constexpr int V_BYTES = TILE_N / STEP * V_STEP + WIDTH * 4;
// Of a stage of b where sums are computed on the lanes: of each feature the stage's points.
constexpr int LINE_BYTES = TILE_N * 4;

// Where kernels leave a call to those launched behind them; zero at first.
struct Gate {
    u32 doubtful;                       // pairs of a sample (split/pack.cuh)
    u32 far;                            // whether a point is too far for a folded exponent
    u32 closed;                         // CLOSED for all but the direct kernels
};
constexpr u32 CLOSED = 0x7fffffff;
