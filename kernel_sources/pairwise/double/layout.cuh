// Points as products of tensor cores read them: tiles of TILE points, in them chunks of DEPTH
// features, in these the points one after the other. What exists no more is zero.
#pragma once

constexpr int THREADS = 128;
constexpr int TILE = 64, DEPTH = 16;
constexpr int PIECE = TILE * DEPTH;  // numbers of a tile's chunk
