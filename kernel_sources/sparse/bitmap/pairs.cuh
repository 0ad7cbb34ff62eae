// sparse/bitmap/many.cuh for wide tiles: where one is cut, two CTAs of a cluster compute its parts,
// whose sums meet in shared memory.
//
// Facts and struct Fixed: class BitmapPairs of kernlib/families/sparse/kernels/bitmap/many.py.
#pragma once

#include "sparse/bitmap/many_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
sparse_bitmap_many(const __grid_constant__ Parameters p) {
    multiply_tile(p);
}
