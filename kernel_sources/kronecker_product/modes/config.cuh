// How large a block and its tiles are, of modes and of halves.
#pragma once

#include "common/types.cuh"

constexpr int WARPS = Config::WARPS, THREADS = WARPS * 32;  // of a CTA
constexpr int MIN_BLOCKS = Config::MIN_BLOCKS;              // CTAs that a multiprocessor holds
constexpr int TILE = Config::TILE, AHEAD = Config::AHEAD;   // elements of a tile, and behind it

// How a tile of numbers T lies in shared memory: RawT, what a number is as it is copied; place(),
// where; and WORDS, how many T that is.
template <class T>
struct Stored;
