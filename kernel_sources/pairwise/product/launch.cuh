// What a product is launched with, and one tile of it.
#pragma once

#include "pairwise/product/block.cuh"
#include "pairwise/reduce/parameters.cuh"
#include "pairwise/split/parameters.cuh"

struct Packed {
    Gate* gate;
    const unsigned char* packed_a;
    const unsigned char* packed_b;       // or lines
    const PointInfo* a_info;
    const PointInfo* b_info;
    const unsigned char* packed_v;
};

struct ProductLaunch : Packed, Parameters, FixedBehind {};
static_assert(sizeof(ProductLaunch) == Config::PARAMETER_BYTES, "as the host lays it out");

// n from n0 on, of which `columns` exist.
struct Tile {
    i64 n0;
    int columns;
};
