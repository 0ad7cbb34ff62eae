// Facts of the kernels whose operands tensor copies bring: hopper.cuh and scaled/scaled.cuh.
#pragma once

#include "blocksparse/hopper/parameters.cuh"
#include "blocksparse/hopper/pieces.cuh"

constexpr int LINES = Config::LINES, DEPTH = Config::DEPTH;  // of a block of op(S): 64 or 128 each
constexpr int TILE_COLUMNS = Config::TILE_COLUMNS;           // 64, 128 or 256
constexpr bool TRANSPOSED = Config::TRANSPOSED;              // whether op(S) is S^T
constexpr bool DEPTH_LAST = Config::DEPTH_LAST;  // dense has the depth contiguous, else its columns
constexpr int STAGE_BYTES = Config::STAGE_BYTES, WORDS = Config::WORDS;
constexpr int WARPGROUPS = Config::WARPGROUPS, TILE_LINES = 64 * WARPGROUPS;
constexpr int PANEL_BYTES = STEP_DEPTH * TILE_COLUMNS * 2;
constexpr int SUMS = TILE_COLUMNS / 2;    // accumulators of a thread
constexpr int PARTS = TILE_COLUMNS / 64;  // of a result
static_assert(STAGE_BYTES == WARPGROUPS * PIECE_BYTES + PANEL_BYTES, "as the host lays it out");
